"""One rank on an emulated host, which trains until something ends it.

python hosts_fault_worker.py FOLDER RANK RANKS HANG_TIMEOUT     `began-RANK` in FOLDER says that two steps are done.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from harness import batches, causal_loss, ds_config, engine_for, llama
from hosts_worker import as_rank


def main(folder: Path, rank: int, ranks: int, limit_s: float) -> None:
    with as_rank(rank, ranks, folder):
        config = ds_config({"window": 2, "hang_timeout": limit_s})
        data = batches(ranks)[rank]
        with engine_for(llama(), config) as engine:
            for step in itertools.count():
                engine.backward(causal_loss(engine, data))
                engine.step()
                if step == 1:
                    (folder / f"began-{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
