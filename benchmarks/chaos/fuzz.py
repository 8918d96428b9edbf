"""Damaged files and messages, one reader after the other, in this process."""

import gzip
import io
import json
import random
import struct
import tarfile
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from flwr.app import Array, ConfigRecord, RecordDict
from PIL import Image
from torch import nn

import fedbe
from benchmarks.chaos.common import Tally
from fedbe import data, report
from fedbe.algorithms.client.training import LocalSettings, Trained
from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.data.readers import idx, plain_pickle, tables
from fedbe.errors import FedBEError
from fedbe.experiment import checkpoint, run_folder, saved_model
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.federation import initial_weights, prepare
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.recorder import NODES_FILE, REPORT_FILE, RunRecorder, read_node_count
from fedbe.flower import from_record, messages, to_record
from fedbe.report.page import render
from fedbe.reproduce import study_analysis, study_runner, table
from fedbe.reproduce.study import load_study

VALUES: tuple[Any, ...] = (
    None, "x", -1, 0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), [], {}, True, 10**400, [[1]], {"a": {"b": 1}},
    "\ud800", "x" * 100_000, [[]] * 3,
)  # fmt: skip
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


def json_mutated(content: bytes, draw: random.Random) -> bytes:
    """Lines of valid JSON, of which one value is replaced, removed or repeated: damage that a parser cannot see."""
    lines = content.splitlines()
    number = draw.randrange(len(lines))
    value = json.loads(lines[number])
    places = list(_places(value))
    if not places or draw.random() < 0.02:
        value = draw.choice(VALUES)
    else:
        table, key = draw.choice(places)
        kind = draw.randrange(8)
        if kind == 0:
            del table[key]
        elif kind == 1 and isinstance(table, dict):
            table[draw.choice(["", "round", "accuracy", "\u00b2", "x" * 300])] = table[key]
        else:
            table[key] = draw.choice(VALUES)
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines) + b"\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table or list in a JSON value, with each of its keys or positions."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@dataclass(frozen=True)
class Reader:
    """A reader of files or messages.

    Attributes:
        content: what it reads, undamaged.
        read: reads a content.
        share: how much rarer it is tried than the fastest ones: it is that much slower.
        is_right: whether a result may be used; a damaged number must not be.
        mutate: damages the content.
    """

    content: bytes
    read: Callable[[bytes], object]
    share: int = 1
    is_right: Callable[[object], bool] = lambda _: True
    mutate: Callable[[bytes, random.Random], bytes] = mutated


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

    def page() -> object:
        return render(report.build_sections(report.read_groups([run])))

    return {
        "checkpoint": Reader(last.read_bytes(), _file(last, lambda: checkpoint.latest(run)), 1, right_state),
        "model": Reader(model.read_bytes(), _file(model, lambda: saved_model.load_trained_model(run)), 10, right_model),
        "rounds.jsonl": Reader(rounds.read_bytes(), _file(rounds, lambda: run_folder.read_rounds(run))),
        "run.json": Reader(info.read_bytes(), _file(info, lambda: run_folder.read_info(run))),
        "report": Reader(rounds.read_bytes(), _file(rounds, page), 200),
        "report, values of rounds.jsonl": Reader(rounds.read_bytes(), _file(rounds, page), 10, mutate=json_mutated),
        "report, values of run.json": Reader(
            json.dumps(json.loads(info.read_bytes())).encode(), _file(info, page), 10, mutate=json_mutated
        ),
        "client cache": _client_cache(run),
        **_kept_json("analysis", *_study_analysis(run)),
        **_kept_json("Flower's report.json", *_flower_report(run.parent / "flower")),
        **_kept_json("Flower's nodes.json", *_node_count(run.parent / "flower")),
    }


def _kept_json(name: str, path: Path, content: bytes, read: Callable[[], object], share: int) -> dict[str, Reader]:
    """Readers of one JSON file, whose bytes are damaged, and whose values are."""
    path.write_bytes(content)
    reader = Reader(content, _file(path, read), share)
    return {name: reader, f"{name}, values": replace(reader, mutate=json_mutated)}


def _client_cache(run: Path) -> Reader:
    """A trained client: a damaged file is none at all, so that the client trains again."""
    recipe = run_folder.read_recipe(run)
    cache = ClientCache(run.parent / "cache", prepare(recipe, 0), Plan(), "this program")
    state = ModelRunner(initial_weights(cache.federation.model, 0)).read()
    job = TrainJob(0, 1, 0, state, LocalSettings(), len(cache.federation.clients[0]))
    cache.save(job, Trained(state, {}, {}, 0.5, 3), 2.0)
    (path,) = cache.folder.iterdir()

    def is_right(loaded: Any) -> bool:
        return loaded is None or (
            torch.equal(loaded[0].state.params, state.params) and (loaded[0].loss, loaded[0].steps) == (0.5, 3)
        )

    return Reader(path.read_bytes(), _file(path, lambda: cache.load(job)), 10, is_right)


def _study_analysis(run: Path) -> tuple[Path, bytes, Callable[[], object], int]:
    """The kept numbers of an analysis, from which a study makes its table and its picture."""
    study = load_study("fig-confidence")
    runs = [replace(one, folder=run) for one in study_runner.study_runs(study, "smoke", 1, run.parent)][:2]
    numbers = {"models": 3, "accuracy": 0.5, "confidence": 0.6, "confidence when wrong": 0.4, "ECE": 0.1}
    kept = dict.fromkeys(("clients", "samples"), numbers | {"bins": [[3.0] * 20, [2.0] * 20]})

    def read() -> object:
        study_analysis.analyse(study, runs, None, lambda: False)
        return table.collect(study, runs)

    return run / study_analysis.FILE, json.dumps(kept).encode(), read, 10


def _flower_report(folder: Path) -> tuple[Path, bytes, Callable[[], object], int]:
    folder.mkdir(exist_ok=True)
    recorder = RunRecorder(folder, fedbe.server("fedavg", nn.Linear(3, 2)))
    metrics = {str(number): {"accuracy": 0.5, "loss": [1.0, 2.0]} for number in (1, 2)}
    report = dict.fromkeys(("train", "evaluate", "server"), metrics)
    return folder / REPORT_FILE, json.dumps(report).encode(), recorder.load, 4


def _node_count(folder: Path) -> tuple[Path, bytes, Callable[[], object], int]:
    return folder / NODES_FILE, b'{"online": 2, "needed": 4}', lambda: read_node_count(folder), 1


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
    mnist, mnist_files = _packed_idx(root / "mnist")
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
        "packed idx": _files(mnist, mnist_files, lambda: idx.read("mnist", mnist)),
        "pickle": Reader(PICKLE, lambda content: plain_pickle.read_plain(content, "pickle")),
    }


def _packed_idx(folder: Path) -> tuple[Path, list[str]]:
    """A small MNIST: its folder, and the files in it."""
    folder.mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">HBBIII", 0, 8, 3, 2, 3, 4) + bytes(range(24))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 2) + b"\1\2"))
    return folder, sorted(path.name for path in folder.iterdir())


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
                tally.differing += not reader.is_right(reader.read(reader.mutate(reader.content, draw)))
            except FedBEError:
                pass
            except Exception:
                tally.raw += 1
                if tally.raw < 4:
                    traceback.print_exc()
        reader.read(reader.content)  # the file is whole again
        tallies[f"damaged {name}"] = tally
    return tallies
