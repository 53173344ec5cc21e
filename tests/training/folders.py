"""Tiny targets, texts and metrics on disk, as runs of training read and write them."""

import json

from tokenizers import Tokenizer as Backend
from tokenizers import models

from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf


def save_target(folder, model):
    words = {f"word{index}": index for index in range(model.config.vocab_size)}
    tokenizer = Tokenizer(Backend(models.WordLevel(words, unk_token="word0")), special_tokens={})
    save_hf(folder, model.config, model.params, tokenizer=tokenizer)
    return str(folder)


def save_texts(path, texts):
    records = ({"prompt_token_ids": list(text.prompt), "token_ids": list(text.answer)}
               for text in texts)  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
