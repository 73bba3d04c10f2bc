"""Trains a text encoder with sentence-transformers' trainer, on stock ZeRO-3 and on DS-Slide.

    python sentence_transformers_worker.py FOLDER

See `serving` for how runs are asked for. Not a test module.
"""

from __future__ import annotations

import tempfile
from typing import Any

import deepspeed
import tiny
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from serving import serve
from trainer_json import trainer_json
from transformers import BertConfig, BertModel

STEPS = 6
PAIRS = [(row, row[::-1]) for row in tiny.QUESTIONS] * 6


def encoder(pooling: str) -> SentenceTransformer:
    """A tiny BERT, from a folder as a user has it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokenizer = tiny.tokenizer()
    folder = tempfile.mkdtemp()
    BertModel(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **sizes)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = Transformer(folder, max_seq_length=32)
    return SentenceTransformer(modules=[words, Pooling(sizes["hidden_size"], pooling)], device="cpu")


def train(case: str, run: str) -> dict[str, Any]:
    model = encoder("cls" if case == "cosine" else "mean")
    rows: dict[str, Any] = {"anchor": [a for a, _ in PAIRS], "positive": [b for _, b in PAIRS]}
    if case == "cosine":
        rows["score"] = [float(number % 2) for number in range(len(PAIRS))]
    loss = losses.CosineSimilarityLoss(model) if case == "cosine" else losses.MultipleNegativesRankingLoss(model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        deepspeed=trainer_json(None if run == "stock" else {"window": 2}),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=Dataset.from_dict(rows), loss=loss)
    before = {name: parameter.detach().clone().bfloat16() for name, parameter in model.named_parameters()}
    trainer.train()
    trained = trainer.model_wrapped.module
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    return {
        "optimizer": type(trainer.model_wrapped.optimizer).__name__,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "before": before,
        "weights": weights,
    }


if __name__ == "__main__":
    serve(lambda _folder, case, run: train(case, run))
