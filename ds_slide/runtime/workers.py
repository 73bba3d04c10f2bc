"""The lanes of an engine, and the order in which they end."""

from __future__ import annotations

from dataclasses import dataclass

from ds_slide.errors import SlideError
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.ssd import SsdStates
from ds_slide.runtime.transfers.stream_worker import StreamWorker
from ds_slide.runtime.updates.update_worker import UpdateWorker
from ds_slide.runtime.weights.shared_weights import SharedWeights


@dataclass
class Workers:
    """The threads. Closed in the order in which work flows, so that nothing queued is lost."""

    h2d: StreamWorker
    outer_h2d: StreamWorker
    """Brings updated outer modules up: in a lane of their own they do not hold up the blocks, nor the blocks them."""
    d2h: StreamWorker
    update: UpdateWorker

    def close(self, ssd: SsdStates | None, shared: SharedWeights | None, failures: Failures) -> None:
        if ssd is None:
            self.d2h.close()
            self.update.close()
        else:
            with ssd.weights.hurry():
                self.d2h.close()
            # Its files end with the run: updates that have not begun would be for nothing. The h2d lanes may be waiting
            # for them.
            ssd.abandon()
            self.update.close()
            failures.record("runtime", SlideError("the engine was destroyed"))
        if shared is not None:
            # The same for those who wait for other ranks. They in turn have all of this rank's updates by now.
            failures.record("runtime", SlideError("the engine was destroyed"))
            shared.close()
        self.h2d.close()
        self.outer_h2d.close()
        if ssd is not None:
            ssd.close()
