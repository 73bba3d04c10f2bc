"""Cross-entropy of a linear layer's logits, in plain torch at the precision of its inputs."""

from __future__ import annotations

import torch


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of hidden [n, h] under weight [v, h] and labels [n], 0-d, in the dtype of `hidden`.

        x = hidden @ weight.T + bias;  x = softcap * tanh(x / softcap)
        lse = logsumexp(x)
        row = (1 - label_smoothing) * (lse - x[label]) + label_smoothing * (lse - mean(x)) + z_loss * lse^2

    Rows whose label is `ignore_index` count nothing; other rows with a label outside [0, v) are nan. The sum over rows
    is divided by `num_items` where given, else for "mean" by the number of counted rows.
    """
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_sum = torch.logsumexp(logits, dim=1)
    counted = labels != ignore_index
    valid = (labels >= 0) & (labels < weight.shape[0])
    target = logits.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
    rows = (1 - label_smoothing) * (log_sum - target) + z_loss * log_sum.square()
    if label_smoothing:
        rows = rows + label_smoothing * (log_sum - logits.mean(dim=1))
    rows = torch.where(counted, torch.where(valid, rows, float("nan")), 0.0)
    if num_items is not None:
        return rows.sum() / num_items
    return rows.sum() / counted.sum() if reduction == "mean" else rows.sum()
