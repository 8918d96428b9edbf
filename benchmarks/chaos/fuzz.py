"""Damaged files and messages, one reader after the other, in this process."""

import io
import json
import random
import struct
import tarfile
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from flwr.app import Array, ConfigRecord, RecordDict
from PIL import Image
from torch import nn

from benchmarks.chaos.common import Tally
from fedbe import data, report
from fedbe.data.readers import idx, plain_pickle, tables
from fedbe.errors import FedBEError
from fedbe.experiment import checkpoint, run_folder, saved_model
from fedbe.experiment.recipe_files import load_recipe
from fedbe.flower import from_record, messages, to_record

WORDS = (b"null", b"1e99", b"[[[[", b'{"a"', b"-1  ", b"\xff\xff\xff\xff", b"true")
PICKLE = (
    b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\n"
    b"ndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x04abcdtbu."
)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with a few random changes: flipped, removed, inserted, repeated, replaced or cut bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed)) if changed else 0
        kind = draw.randrange(12)
        if kind < 4 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind < 6:
            del changed[at : at + draw.randint(1, 40)]
        elif kind < 8:
            changed[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 8:
            changed[at:at] = changed[at : at + draw.randint(1, 60)]
        elif kind < 11:
            changed[at : at + 4] = draw.choice(WORDS)
        else:
            del changed[at:]
    return bytes(changed)


@dataclass(frozen=True)
class Reader:
    """A reader of files or messages.

    Attributes:
        content: what it reads, undamaged.
        read: reads a content.
        share: how much rarer it is tried than the fastest ones: it is that much slower.
        is_right: whether a result may be used; a damaged number must not be.
    """

    content: bytes
    read: Callable[[bytes], object]
    share: int = 1
    is_right: Callable[[object], bool] = lambda _: True


def _file(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    def written_and_read(content: bytes) -> object:
        path.write_bytes(content)
        return read()

    return written_and_read


def _files(folder: Path, names: list[str], read: Callable[[], object]) -> Reader:
    """A reader of several small files: a content is all of them, so any of them is damaged."""
    separator = b"\0next file\0"

    def written_and_read(content: bytes) -> object:
        parts = content.split(separator)
        for name, part in zip(names, parts + [b""] * len(names), strict=False):
            (folder / name).write_bytes(part)
        return read()

    return Reader(separator.join((folder / name).read_bytes() for name in names), written_and_read, 10)


def run_readers(run: Path) -> dict[str, Reader]:
    """The readers of a run folder's files."""
    last, model, info = checkpoint.paths(run)[0], run / "model.safetensors", run / "run.json"
    params = checkpoint.read(last).model.params
    weights = saved_model.load_trained_model(run).module.state_dict()

    def right_state(state: object) -> bool:
        return getattr(state, "round", 0) != 2 or torch.equal(state.model.params, params)  # type: ignore[attr-defined]

    def right_model(trained: object) -> bool:
        state = trained.module.state_dict()  # type: ignore[attr-defined]
        return all(torch.equal(state[name], weights[name]) for name in weights)

    rounds = run / "rounds.jsonl"
    return {
        "checkpoint": Reader(last.read_bytes(), _file(last, lambda: checkpoint.latest(run)), 1, right_state),
        "model": Reader(model.read_bytes(), _file(model, lambda: saved_model.load_trained_model(run)), 10, right_model),
        "rounds.jsonl": Reader(rounds.read_bytes(), _file(rounds, lambda: run_folder.read_rounds(run))),
        "run.json": Reader(info.read_bytes(), _file(info, lambda: run_folder.read_info(run))),
        "report": Reader(
            rounds.read_bytes(), _file(rounds, lambda: report.build_sections(report.read_groups([run]))), 200
        ),
    }


def data_readers(root: Path) -> dict[str, Reader]:
    """The readers of recipes and of data files."""
    numbers = np.random.default_rng(0)
    npz, table, parquet, recipe = root / "a.npz", root / "a.csv", root / "a.parquet", root / "a.toml"
    np.savez(npz, inputs=numbers.random((10, 4)), labels=np.arange(10) % 3)
    table.write_text("a,b,label\n" + "".join(f"{i},{i / 7:.2f},{'xyz'[i % 3]}\n" for i in range(12)))
    columns = {"a": list(range(12)), "b": ["u", "v"] * 6, "label": list("xyz") * 4}
    pyarrow.parquet.write_table(pyarrow.table(columns), parquet)
    source = 'method = "fedbe"\n[data]\nsource = "digits"\nserver = 300\n[split]\nkind = "step"\nclients = 10\n'
    zipped, tar, image = root / "a.zip", root / "a.tar.gz", root / "images/x/0.png"
    batches = {f"{name}.bin": bytes(2 * 3073) for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")}
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive, tarfile.open(tar, "w:gz") as tarred:
        for name, content in batches.items():
            archive.writestr(name, content)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tarred.addfile(member, io.BytesIO(content))
    for label in "xy":
        (root / "images" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(numbers.integers(0, 255, (5, 5, 3), np.uint8)).save(root / f"images/{label}/{i}.png")
    tiny, tiny_files = _tiny_imagenet(root / "tiny-imagenet-200", numbers)
    return {
        "recipe": Reader(source.encode(), _file(recipe, lambda: load_recipe(recipe)), 2),
        ".npz": Reader(npz.read_bytes(), _file(npz, lambda: data.load_task(f"npz:{npz}"))),
        ".csv": Reader(table.read_bytes(), _file(table, lambda: tables.read(table))),
        ".parquet": Reader(parquet.read_bytes(), _file(parquet, lambda: tables.read(parquet)), 4),
        "Tiny-ImageNet": _files(tiny, tiny_files, lambda: data.load_task(f"tiny-imagenet:{tiny}")),
        "zip archive": Reader(zipped.read_bytes(), _file(zipped, lambda: data.load_task(f"cifar10:{zipped}"))),
        "tar archive": Reader(tar.read_bytes(), _file(tar, lambda: data.load_task(f"cifar10:{tar}"))),
        "image": Reader(image.read_bytes(), _file(image, lambda: data.load_task(f"folder:{root / 'images'}")), 10),
        "idx": Reader(
            struct.pack(">HBBIII", 0, 8, 3, 2, 3, 4) + bytes(range(24)), lambda content: idx.parse(content, 3, "idx")
        ),
        "pickle": Reader(PICKLE, lambda content: plain_pickle.read_plain(content, "pickle")),
    }


def _tiny_imagenet(folder: Path, numbers: np.random.Generator) -> tuple[Path, list[str]]:
    """A small Tiny-ImageNet: its folder, and the files in it."""
    images = [f"train/{wnid}/images/{wnid}_0.JPEG" for wnid in ("n01", "n02")] + ["val/images/val_0.JPEG"]
    texts = {"wnids.txt": "n01\nn02\n", "words.txt": "n01\tcat\nn02\tdog\n"}
    texts["val/val_annotations.txt"] = "val_0.JPEG\tn02\t0\t0\t9\t9\n"
    for name in (*images, *texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in images:
        Image.fromarray(numbers.integers(0, 255, (64, 64, 3), np.uint8)).save(folder / name)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder, [*texts, *images]


def message_readers() -> dict[str, Reader]:
    """The readers of Flower's arrays and of our own instructions in its messages."""
    model = nn.Linear(3, 2)
    record = to_record(model.state_dict())
    array = record["weight"]

    def read_array(content: bytes) -> object:
        record["weight"] = Array("float32", (2, 3), array.stype, content)
        return from_record(record, model)

    def read_instructions(content: bytes) -> object:
        words = content.decode("utf-8", "replace").split("|")
        keys = ("method", "rules", "seed", "memory", "weight")
        config = {f"fedbe.{key}": word for key, word in zip(keys, words, strict=False)}
        return messages.read_instructions(RecordDict({"config": ConfigRecord({"server-round": 1, **config})}))

    rules = json.dumps({"proximal_mu": 0.01})
    return {
        "Flower array": Reader(array.data, read_array),
        "instructions": Reader(f"fedprox|{rules}|0|own|num-examples".encode(), read_instructions),
    }


def fuzz(count: int, seed: int, readers: dict[str, Reader]) -> dict[str, Tally]:
    """Read damaged contents, `count` over all readers: a result that may be used, or one sentence."""
    unit = count / sum(1 / reader.share for reader in readers.values())
    tallies = {}
    for name, reader in readers.items():
        tally, draw = Tally(), random.Random(f"{seed} {name}")
        for _ in range(max(1, round(unit / reader.share))):
            tally.tried += 1
            try:
                tally.differing += not reader.is_right(reader.read(mutated(reader.content, draw)))
            except FedBEError:
                pass
            except Exception:
                tally.raw += 1
                if tally.raw < 4:
                    traceback.print_exc()
        reader.read(reader.content)  # the file is whole again
        tallies[f"damaged {name}"] = tally
    return tallies
