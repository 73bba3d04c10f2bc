"""A tiny chat model, its tokenizer and data, built in code: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant>"
    "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
    "{% else %}<user>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = (
    "one and two",
    "red or blue",
    "who is it",
    "a long day",
    "up and down",
    "north of here",
    "six of ten",
    "why",
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate((*SPECIAL, *alphabet))}
    model = Tokenizer(models.BPE(vocab=words, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


def _config(tie: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def causal_model(*, tie: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(_config(tie)).bfloat16()


def reward_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = _config(tie=False)
    config.num_labels = 1
    return LlamaForSequenceClassification(config).bfloat16()


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def conversations(count: int) -> Dataset:
    rows = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    return Dataset.from_list([{"messages": turns(row, row[::-1] * (1 + i % 3))} for i, row in enumerate(rows)])


def texts(count: int) -> Dataset:
    rows = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    return Dataset.from_list([{"text": f"{row} {row[::-1]} " * (1 + i % 3)} for i, row in enumerate(rows)])


def preferences(count: int) -> Dataset:
    rows: list[dict[str, Any]] = []
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)]
        turn = turns(question, "")[0]
        answers = ({"role": "assistant", "content": text} for text in (question[::-1], f"no {question} {i}"))
        rows.append({"prompt": [turn], "chosen": [next(answers)], "rejected": [next(answers)]})
    return Dataset.from_list(rows)


def prompts(count: int) -> Dataset:
    rows = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows])
