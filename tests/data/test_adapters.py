import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from fedbe.data import Dataset, Task, load_task
from fedbe.data.adapters import from_hugging_face
from fedbe.data.arrays import from_arrays
from fedbe.errors import DataError


def save_images(folder, count, mode="RGB", size=(6, 5)):
    folder.mkdir(parents=True)
    for number in range(count):
        colour = (number, 2 * number, 3 * number) if mode == "RGB" else number
        Image.new(mode, size, colour).save(folder / f"{number}.png")


def first_pixels(data):
    return sorted(data.inputs[:, 0, 0, 0].tolist())


def test_folder_of_class_folders(tmp_path):
    save_images(tmp_path / "cats", 10)
    save_images(tmp_path / "dogs", 5)
    (tmp_path / "cats" / "notes.txt").write_text("not an image")
    task = load_task(f"folder:{tmp_path}")
    assert task.train.classes == ("cats", "dogs")
    assert task.train.inputs.shape == (12, 5, 6, 3)
    assert torch.bincount(task.test.labels).tolist() == [2, 1]  # a stratified fifth
    assert sorted(first_pixels(task.train) + first_pixels(task.test)) == sorted([*range(10), *range(5)])
    assert load_task(tmp_path).train.digest() == task.train.digest()  # a plain path works too
    assert load_task(tmp_path, seed=1).train.digest() != task.train.digest()


def test_a_folder_without_images_is_an_error(tmp_path):
    save_images(tmp_path / "cats", 5)
    save_images(tmp_path / "dogs", 5)
    save_images(tmp_path / ".ipynb_checkpoints", 2)  # hidden, so ignored
    (tmp_path / "cats" / "._0.png").write_text("macOS writes these")
    assert load_task(tmp_path).train.classes == ("cats", "dogs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no images"):
        load_task(tmp_path)


def test_folder_with_train_and_test_and_grey_images(tmp_path):
    for part, count in (("train", 4), ("test", 2)):
        for name in ("x", "y"):
            save_images(tmp_path / part / name, count, mode="L")
    task = load_task(f"folder:{tmp_path}")
    assert task.train.inputs.shape == (8, 5, 6, 1)
    assert task.test.inputs.shape == (4, 5, 6, 1)
    assert task.train.labels.tolist() == [0] * 4 + [1] * 4


def test_one_colour_image_makes_all_of_them_colour(tmp_path):
    save_images(tmp_path / "a", 3, mode="L")
    save_images(tmp_path / "b", 3, mode="RGB")
    assert load_task(tmp_path).train.inputs.shape[-1] == 3


def test_unusable_folders_are_errors(tmp_path):
    with pytest.raises(DataError, match="one folder of images"):
        load_task(f"folder:{tmp_path}")
    with pytest.raises(DataError, match="does not exist"):
        load_task(f"folder:{tmp_path / 'nowhere'}")
    save_images(tmp_path / "a", 3)
    save_images(tmp_path / "b", 3, size=(7, 5))
    with pytest.raises(DataError, match=r"one size.*6 × 5.*7 × 5"):
        load_task(tmp_path)


def test_error_names_the_unreadable_image(tmp_path):
    save_images(tmp_path / "a", 5)
    (tmp_path / "a" / "9.png").write_bytes(b"not a png")
    with pytest.raises(DataError, match=r"9\.png is not a readable image"):
        load_task(tmp_path)
    save_images(tmp_path / "b" / "c", 1, size=(64, 64))
    whole = (tmp_path / "b" / "c" / "0.png").read_bytes()
    (tmp_path / "b" / "c" / "0.png").write_bytes(whole[:60])
    with pytest.raises(DataError, match=r"0\.png is not a readable image"):
        load_task(tmp_path / "b")


IMAGES = np.arange(10 * 4 * 4 * 3, dtype=np.int64).astype(np.uint8).reshape(10, 4, 4, 3)
LABELS = np.array([0, 1] * 5)


def test_npz(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, inputs=IMAGES, labels=LABELS, classes=["no", "yes"], clients=np.arange(10) // 4)
    task = load_task(f"npz:{path}")
    assert task.train.classes == ("no", "yes")
    assert len(task.train) == 8
    assert task.train.client_ids.shape == (8,)
    assert task.train.name == "mine"
    assert load_task(path).train.digest() == task.train.digest()


def test_npz_with_a_test_part_in_keras_names(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=IMAGES[..., 0], y_train=LABELS, x_test=IMAGES[:3, ..., 0], y_test=LABELS[:3, None])
    task = load_task(path)
    assert task.train.inputs.shape == (10, 4, 4, 1)
    assert task.train.labels.tolist() == LABELS.tolist()
    assert task.test.labels.tolist() == [0, 1, 0]


def test_npz_never_unpickles(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, inputs=np.array([{"an": "object"}], dtype=object), labels=np.zeros(1, int))
    with pytest.raises(DataError, match=r"not an \.npz of plain arrays"):
        load_task(path)


def test_npz_with_class_names_that_are_not_valid_text(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, inputs=IMAGES, labels=LABELS, classes=np.array([2**31, 7], np.uint32).view("<U1"))
    with pytest.raises(DataError, match=r"not an \.npz of plain arrays"):
        load_task(path)


def test_npz_without_the_required_arrays_or_damaged(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, pixels=IMAGES)
    with pytest.raises(DataError, match=r"`inputs` and `labels`.*but has pixels"):
        load_task(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"not an \.npz file"):
        load_task(path)
    with path.open("wb") as file:
        np.save(file, IMAGES)  # an .npy with the suffix .npz
    with pytest.raises(DataError, match=r"not an \.npz file; write it with numpy\.savez"):
        load_task(path)
    np.savez_compressed(path, inputs=IMAGES, labels=LABELS)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"not an \.npz of plain arrays"):
        load_task(path)


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        (IMAGES, (4, 4, 3)),
        (IMAGES.transpose(0, 3, 1, 2), (4, 4, 3)),
        (IMAGES[..., 0], (4, 4, 1)),
        (torch.from_numpy(IMAGES), (4, 4, 3)),
        (torch.from_numpy(IMAGES.reshape(10, -1)).bfloat16().requires_grad_(), (48,)),
        (IMAGES.transpose(0, 3, 1, 2) / 255, (4, 4, 3)),
        (IMAGES.reshape(10, -1) * 1.5, (48,)),
    ],
)
def test_arrays_in_common_shapes(inputs, shape):
    task = load_task((inputs, LABELS))
    assert tuple(task.train.inputs.shape[1:]) == shape
    whole = torch.cat([task.train.inputs, task.test.inputs]).flatten(1).double().sum(1)
    if len(shape) == 3 and shape[2] == 3:  # no pixel changed
        assert sorted(whole.tolist()) == sorted(IMAGES.reshape(10, -1).sum(1).tolist())


@pytest.mark.parametrize(
    ("inputs", "labels", "sentence"),
    [
        (IMAGES.astype(np.int32), LABELS, "images must be uint8 or floats"),
        (IMAGES - 0.5, LABELS, r"floats must be in \[0, 1\]"),
        (IMAGES[0, 0, 0], LABELS, "must have 2, 3 or 4 axes"),
        (IMAGES.reshape(10, -1).astype(str), LABELS, "inputs must be numbers.*got <U"),
        (IMAGES.reshape(10, -1) * 1j, LABELS, "inputs must be numbers.*got complex128"),
        (IMAGES, LABELS * 0.5, "labels must be integers"),
        (IMAGES, LABELS[:4], r"`labels` must be int64 of shape \[10\]"),
    ],
)
def test_unusable_arrays_are_errors(inputs, labels, sentence):
    with pytest.raises(DataError, match=sentence):
        load_task((inputs, labels))


def test_unusable_mappings_are_errors():
    with pytest.raises(DataError, match=r"the key 'train'.*got test, more"):
        load_task({"test": (IMAGES, LABELS), "more": 1})
    with pytest.raises(DataError, match=r"got train, validation; choose"):
        load_task({"train": (IMAGES, LABELS), "validation": (IMAGES, LABELS)})
    with pytest.raises(DataError, match="must be data sets"):
        load_task({"train": load_task((IMAGES, LABELS))})


def test_training_and_test_arrays_as_keras_has_them():
    task = load_task(((IMAGES, LABELS[:, None]), (IMAGES[:3], LABELS[:3])))
    assert (len(task.train), len(task.test)) == (10, 3)


class Frame:
    """What a DataFrame looks like: columns by name, and no rows by number."""

    columns = ("age", "label")

    def __len__(self):
        return 10

    def __getitem__(self, column):
        raise KeyError(column)

    def to_numpy(self):
        return np.zeros((10, 2))


@pytest.mark.usefixtures("warns_always")
def test_read_only_arrays_as_those_of_a_data_frame():
    inputs, labels, ids = np.ones((10, 3)), np.arange(10) % 2, np.ones((10, 3), np.int64)
    for array in (inputs, labels, ids):
        array.setflags(write=False)
    assert load_task((inputs, labels)).train.inputs.dtype == torch.float32
    assert load_task((ids, labels)).train.inputs.dtype == torch.int64
    assert load_task(({"ids": ids}, labels)).train.inputs["ids"].shape == (8, 3)


def test_a_data_frame_is_an_error():
    with pytest.raises(DataError, match=r"cannot read a DataFrame.*to_numpy"):
        load_task(Frame())


RAGGED = [[0, 1], [1]] * 5


@pytest.mark.parametrize(
    "source",
    [
        (np.zeros((10, 2), np.int64), RAGGED),
        [(np.zeros(2, np.int64), tags) for tags in RAGGED],
        ({"ids": RAGGED}, LABELS),
        (RAGGED, LABELS),
    ],
    ids=["labels", "torch labels", "dict", "inputs"],
)
def test_lists_of_several_lengths_are_an_error(source):
    with pytest.raises(DataError, match="must have one shape"):
        load_task(source)


class Photos(torch.utils.data.Dataset):
    classes = ("even", "odd")

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return Image.fromarray(IMAGES[index]), index % 2


def test_torch_data_sets():
    task = load_task(Photos())
    assert task.train.classes == ("even", "odd")
    assert task.train.inputs.shape == (8, 4, 4, 3)
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255, torch.arange(10) % 2)
    both = torch.cat([load_task(tensors).train.inputs, load_task(tensors).test.inputs])
    assert sorted(both.flatten(1).sum(1).tolist()) == sorted(IMAGES.reshape(10, -1).sum(1).tolist())


@pytest.fixture
def hf(library):
    """The library `datasets`."""
    return library("datasets")


@pytest.fixture
def table(hf):
    """table(10): a Hugging Face data set of that many images of cats and dogs; more columns as (values, feature)."""

    def make(rows, **more):
        images = [Image.fromarray(i) for i in IMAGES[:rows]]
        names = hf.ClassLabel(names=["cat", "dog"])
        columns = {"img": (images, hf.Image()), "label": ([n % 2 for n in range(rows)], names), **more}
        features = hf.Features({name: feature for name, (_, feature) in columns.items()})
        return hf.Dataset.from_dict({name: values for name, (values, _) in columns.items()}, features=features)

    return make


def test_hugging_face_table(hf, table):
    task = load_task(table(10, client_id=([5] * 6 + [9] * 4, hf.Value("int64"))))
    assert task.train.classes == ("cat", "dog")
    assert task.train.inputs.shape == (8, 4, 4, 3)
    assert sorted(first_pixels(task.train) + first_pixels(task.test)) == sorted(IMAGES[:, 0, 0, 0].tolist())
    assert sorted(torch.cat([task.train.client_ids, task.test.client_ids]).tolist()) == [5] * 6 + [9] * 4


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_hugging_face_format_changes_nothing(kind, table):
    assert load_task(table(10).with_format(kind)).train.digest() == load_task(table(10)).train.digest()


def test_hugging_face_parts(hf, table):
    task = load_task(hf.DatasetDict(train=table(7), test=table(3)))
    assert (len(task.train), len(task.test)) == (7, 3)
    assert len(load_task({"train": table(10)}).test) == 2


def test_hugging_face_uses_the_finest_labels(hf, table):
    coarse = ([0] * 10, hf.ClassLabel(names=["animal"]))
    assert load_task(table(10, coarse=coarse)).train.classes == ("cat", "dog")
    renamed = table(10, coarse=coarse).rename_column("label", "fine")
    assert load_task(renamed).train.classes == ("cat", "dog")


def test_hugging_face_prefers_the_column_that_is_called_label(hf, table):
    country = ([0, 1, 2, 0, 1] * 2, hf.ClassLabel(names=["de", "fr", "it"]))
    mails = hf.Dataset.from_dict(
        {"country": country[0], "words": [5, 7] * 5, "sentiment": [0, 1] * 5},
        features=hf.Features({"country": country[1], "words": hf.Value("int64"), "sentiment": hf.Value("int64")}),
    )
    assert from_hugging_face(mails, "mails").classes == ("de", "fr", "it")
    data = from_hugging_face(mails.rename_column("sentiment", "label"), "mails")
    assert data.classes == ("0", "1")
    assert data.inputs[:2].tolist() == [[5, 0], [7, 1]]
    country_first = table(10, country=country).select_columns(["country", "img", "label"])
    assert from_hugging_face(country_first, "photos").inputs.shape == (10, 4, 4, 3)


def people(hf, *values):
    columns = {"age": [20] * len(values), "sex": list(values), "target": [0, 1] * (len(values) // 2)}
    return hf.Dataset.from_dict(columns)


def test_texts_of_all_parts_are_one_encoding(hf, library):
    """A text gives the same vector in every part, also where a part does not have all texts."""
    parts = people(hf, "a", "b", "a", "b"), people(hf, "b", "c")
    task = load_task(hf.DatasetDict(train=parts[0], test=parts[1]))
    assert task.train.inputs[:2].tolist() == [[20, 1, 0, 0], [20, 0, 1, 0]]
    assert task.test.inputs.tolist() == [[20, 0, 1, 0], [20, 0, 0, 1]]
    partitioner = library("flwr_datasets.partitioner").NaturalIdPartitioner("sex")
    partitioner.dataset = people(hf, *"aaaabbbb")
    task = load_task(partitioner)
    ids, inputs = (
        torch.cat([getattr(part, name) for part in (task.train, task.test)]) for name in ("client_ids", "inputs")
    )
    assert sorted({(client, *row) for client, row in zip(ids.tolist(), map(tuple, inputs.tolist()), strict=True)}) == [
        (0, 20, 1, 0), (1, 20, 0, 1),
    ]  # fmt: skip


def test_parts_with_other_columns_are_an_error(hf):
    parts = {"train": people(hf, "a", "b"), "test": people(hf, "a", "b").rename_column("sex", "gender")}
    with pytest.raises(DataError, match=r"parts .* the same columns.*sex.*gender"):
        load_task(parts)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"age": [1.0, None], "target": [0, 1]}, "'age' must have one number or text in each row"),
        ({"sex": ["f", None], "target": [0, 1]}, "'sex' must have one number or text in each row"),
        ({"age": [1, 2], "box": [[1, 2], [3, 4]], "target": [0, 1]}, "'box' must have one number or text"),
        ({"age": [1, 2], "target": ["yes", ""]}, "'target' has missing values"),
        ({"age": [1, 2], "target": ["yes", None]}, "'target' has missing values"),
        ({"age": [1, 2], "target": [0, 1], "client": ["north", None]}, "'client' has missing values"),
        ({"x": [[1, 2], [3, 4]], "target": [[0, 1], [1]]}, "target must have one shape, got several lengths"),
    ],
)
def test_hugging_face_tables_with_missing_values(hf, columns, message):
    with pytest.raises(DataError, match=message):
        from_hugging_face(hf.Dataset.from_dict(columns), "people")


def test_hugging_face_columns_of_numbers_are_a_table(hf):
    columns = {
        "age": [20.0, 30.0, 40.0] * 5,
        "sex": ["f", "m", "f"] * 5,
        "client": [0, 1, 2] * 5,
        "target": [5, 7, 5] * 5,
    }
    data = from_hugging_face(hf.Dataset.from_dict(columns), "people")
    assert data.inputs[:3].tolist() == [[20, 1, 0], [30, 0, 1], [40, 1, 0]]
    assert data.classes == ("5", "7")
    assert data.client_ids[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("declared", [True, False], ids=["Array3D", "nested lists"])
def test_hugging_face_arrays_of_bytes_are_images(declared, hf):
    """Without a declared shape, `datasets` makes nested lists of the arrays, and only the innermost has a type."""
    features = hf.Features({"img": hf.Array3D((4, 4, 3), "uint8"), "label": hf.Value("int64")}) if declared else None
    data = from_hugging_face(
        hf.Dataset.from_dict({"img": list(IMAGES), "label": [0, 1] * 5}, features=features), "images"
    )
    assert data.inputs.dtype == torch.uint8
    assert data.inputs.tolist() == IMAGES.tolist()


def test_hugging_face_columns_without_a_label_are_an_error(hf):
    with pytest.raises(DataError, match=r"has x, sentiment; rename one with `rename_column`"):
        from_hugging_face(hf.Dataset.from_dict({"x": [1.0, 2.0], "sentiment": [0, 1]}), "mails")


def test_hugging_face_images_of_two_sizes_are_an_error(hf, table):
    other = hf.concatenate_datasets([table(3), table(1).map(lambda _: {"img": Image.new("RGB", (5, 4))})])
    with pytest.raises(DataError, match=r"one shape, got \[4, 4, 3\] and"):
        load_task(other)


def test_a_torch_data_set_of_dicts_without_labels_is_an_error():
    with pytest.raises(DataError, match=r"pairs, got a dict"):
        load_task(torch.utils.data.StackDataset(image=torch.zeros(9, 2), number=torch.zeros(9)))


IDS = np.arange(30).reshape(10, 3)
MASK = np.ones((10, 3))


@pytest.mark.parametrize(
    "source",
    [
        ({"input_ids": IDS, "attention_mask": MASK}, LABELS),
        ({"input_ids": IDS.tolist(), "attention_mask": MASK.tolist()}, LABELS),
        [
            ({"input_ids": i.tolist(), "attention_mask": m.tolist()}, int(y))
            for i, m, y in zip(IDS, MASK, LABELS, strict=True)
        ],
        [{"input_ids": i, "attention_mask": m, "label": int(y)} for i, m, y in zip(IDS, MASK, LABELS, strict=True)],
        {"train": ({"input_ids": IDS, "attention_mask": MASK}, LABELS)},
    ],
    ids=["arrays", "lists", "pairs", "dicts", "mapping"],
)
def test_several_tensors_stay_as_they_are(source):
    task = load_task(source)
    assert {name: tensor.dtype for name, tensor in task.train.inputs.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.float64,
    }
    assert task.train.inputs["input_ids"].shape == (8, 3)
    assert load_task(source).train.digest() == task.train.digest()


def test_npz_of_tokens(tmp_path):
    path = tmp_path / "mails.npz"
    np.savez(path, input_ids=IDS, attention_mask=MASK, labels=LABELS, test_input_ids=IDS[:4],
             test_attention_mask=MASK[:4], test_labels=LABELS[:4])  # fmt: skip
    task = load_task(path)
    assert list(task.test.inputs) == ["input_ids", "attention_mask"]
    assert len(task.test) == 4


def test_integers_with_two_axes_are_token_ids():
    assert load_task((IDS, LABELS)).train.inputs.dtype == torch.int64
    assert load_task((IDS.astype(np.uint8), LABELS)).train.inputs.dtype == torch.float32
    with pytest.raises(DataError, match="of one length"):
        load_task(((IDS, MASK[:4]), LABELS))
    with pytest.raises(DataError, match="must be a tensor, got str"):
        load_task((("text", "text"), LABELS))


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["spam", "ham", "spam", "ham", "eggs"], ("eggs", "ham", "spam"), [2, 1, 2, 1, 0]),
        ([1, 2, 5, 2, 1], ("1", "2", "5"), [0, 1, 2, 1, 0]),
        ([-1, 1, 1, -1, 1], ("-1", "1"), [0, 1, 1, 0, 1]),
        ([True, False, True, True, True], ("False", "True"), [1, 0, 1, 1, 1]),
    ],
)
def test_labels_that_are_not_class_indices(labels, classes, numbers):
    data = from_arrays("mine", np.zeros((5, 2)), labels)
    assert (data.classes, data.labels.tolist()) == (classes, numbers)


def test_a_class_that_only_the_test_part_has(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, X=np.zeros((3, 2)), y=[2, 10, 2], X_test=np.zeros((2, 2)), y_test=[3, 10])
    task = load_task(path)
    assert task.train.classes == task.test.classes == ("2", "3", "10")
    assert (task.train.labels.tolist(), task.test.labels.tolist()) == ([0, 2, 0], [1, 2])


def test_texts_that_are_not_a_class():
    with pytest.raises(DataError, match=r"label 'cat' .*classes dog, cow"):
        from_arrays("mine", np.zeros((2, 2)), ["cat", "dog"], ["dog", "cow"])


@pytest.mark.parametrize("labels", [[[0, 1, -100]] * 5, [0, 1, 2, 1, -100]])
def test_positions_without_a_label_are_not_a_class(labels):
    with pytest.raises(DataError, match="some are -100"):
        from_arrays("tags", np.zeros((5, 3), np.int64), labels)


def test_sequences_of_floats_do_not_become_images():
    series = np.random.default_rng(0).random((10, 6, 2))
    with pytest.raises(DataError, match=r"pass sequences as \{'x': array\}"):
        load_task((series, LABELS))
    with pytest.raises(DataError, match=r"pass sequences as \{'x': array\}"):
        load_task((series - 0.5, LABELS))
    assert load_task(({"x": series}, LABELS)).train.inputs["x"].shape == (8, 6, 2)
    assert load_task((series[..., None], LABELS)).train.inputs.shape == (8, 6, 2, 1)
    grey = IMAGES[..., 0]
    for dtype in (np.float16, np.float32):
        assert (
            load_task((grey.astype(dtype) / dtype(255), LABELS)).train.digest()
            == load_task((grey, LABELS)).train.digest()
        )


def test_one_class_for_each_pixel():
    labels = np.arange(40).reshape(10, 2, 2) % 3
    task = load_task((np.zeros((10, 2, 2), np.uint8), labels))
    assert task.train.labels.shape == (8, 2, 2)
    assert task.train.classes == ("0", "1", "2")


def test_a_partitioner_gives_clients(library, table):
    made = library("flwr_datasets.partitioner").SizePartitioner([4, 5])
    made.dataset = table(9)
    task = load_task(made)
    assert task.train.classes == ("cat", "dog")
    assert sorted(torch.cat([task.train.client_ids, task.test.client_ids]).tolist()) == [0] * 4 + [1] * 5


def test_client_ids_may_be_texts(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, inputs=np.zeros((10, 2)), labels=LABELS, clients=["eve"] * 5 + ["bob"] * 5)
    task = load_task(path)
    ids = torch.cat([task.train.client_ids, task.test.client_ids])
    assert torch.bincount(ids).tolist() == [5, 5]


def test_a_table_without_class_names_is_an_error(hf):
    with pytest.raises(DataError, match=r"class names.*but has text"):
        load_task(hf.Dataset.from_dict({"text": ["a"] * 4}))


def test_a_table_with_integer_labels_and_tokens(hf):
    columns = {"text": ["a"] * 4, "input_ids": [[1, 2]] * 4, "label": [1, 3, 3, 1]}
    data = from_hugging_face(hf.Dataset.from_dict(columns), "mails")
    assert (data.classes, data.labels.tolist()) == (("1", "3"), [0, 1, 1, 0])
    assert data.inputs["input_ids"].tolist() == [[1, 2]] * 4
    with pytest.raises(DataError, match="'text' has texts; tokenize them first"):
        from_hugging_face(hf.Dataset.from_dict(columns).remove_columns("input_ids"), "mails")


MODULE = """
import numpy as np
import torch
from fedbe.data import Dataset

def arrays():
    return np.zeros((10, 3)), np.arange(10) % 2

def dataset():
    return Dataset("mine", torch.zeros(10, 3), torch.arange(10) % 2, ("a", "b"))

number = 3

def nothing():
    return None
"""


class TestBombs:
    """Small files that announce, or unpack to, far more than they are."""

    def test_an_npz_of_zeros_is_refused(self, tmp_path):
        path = tmp_path / "bomb.npz"
        np.savez_compressed(path, inputs=np.zeros((80, 1 << 20), np.uint8), labels=np.zeros(80, int))
        assert path.stat().st_size < 200_000
        with pytest.raises(DataError, match="looks like a zip bomb"):
            load_task(f"npz:{path}")

    def test_a_header_that_announces_16_terabytes(self, tmp_path):
        path = tmp_path / "liar.npz"
        file = io.BytesIO()
        np.save(file, np.zeros(4))
        content = file.getvalue().replace(b"(4,), }" + b" " * 12, b"(4000000000000,), }")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inputs.npy", content)
            archive.writestr("labels.npy", file.getvalue())
        with pytest.raises(DataError, match="announces 32000000000000 bytes and has 32"):
            load_task(f"npz:{path}")

    def test_labels_that_take_no_space_in_the_file(self, tmp_path):
        path, file = tmp_path / "empty.npz", io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<U0", "fortran_order": False, "shape": (20_000_000,)})
        inputs = io.BytesIO()
        np.save(inputs, np.zeros((4, 2)))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("labels.npy", file.getvalue())
            archive.writestr("inputs.npy", inputs.getvalue())
        with pytest.raises(DataError, match=r"'labels.npy' has values without bytes \(<U0\)"):
            load_task(f"npz:{path}")

    def test_a_small_png_of_very_many_pixels(self, tmp_path):
        folder = tmp_path / "images" / "a"
        folder.mkdir(parents=True)
        Image.new("1", (9000, 9000)).save(folder / "bomb.png")
        assert (folder / "bomb.png").stat().st_size < 20_000
        with pytest.raises(DataError, match="9000 × 9000 pixels are more than"):
            load_task(f"folder:{tmp_path / 'images'}")

    def test_a_huge_label_does_not_make_billions_of_class_names(self):
        labels = np.array([0] * 7 + [2**33])
        assert load_task((np.zeros((8, 2)), labels)).train.classes == ("0", str(2**33))


def test_module_and_function(tmp_path, monkeypatch):
    package = tmp_path / "somebody"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_task("somebody.sets:arrays").train.inputs.shape == (8, 3)
    assert load_task("somebody.sets:dataset").train.classes == ("a", "b")
    with pytest.raises(DataError, match=r"missing' must name a function"):
        load_task("somebody.sets:missing")
    with pytest.raises(DataError, match="must name a function"):
        load_task("no.such:thing")
    with pytest.raises(DataError, match="must name a function"):
        load_task("somebody.sets:number")
    with pytest.raises(DataError, match="cannot read data from NoneType"):
        load_task("somebody.sets:nothing")


def test_tasks_and_datasets_pass_through():
    data = Dataset("mine", torch.zeros(10, 3), torch.arange(10) % 2, ("a", "b"))
    task = Task(data, data)
    assert load_task(task) is task
    assert len(load_task(data).test) == 2


def test_too_few_to_hold_out():
    with pytest.raises(DataError, match="must have 5 examples or more"):
        load_task((np.zeros((4, 2)), np.zeros(4, int)))
    with pytest.raises(DataError, match=r"pairs, got nothing"):
        load_task(torch.utils.data.TensorDataset(torch.zeros(0, 2), torch.zeros(0)))


MULTI_HOT = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]] * 5)


@pytest.mark.parametrize("inputs", [np.zeros((20, 3)), np.zeros((20, 8, 8)), np.zeros((20, 7), np.int64)])
def test_multi_hot_labels_are_refused_at_the_door(tmp_path, inputs):
    """Vectors, images and texts of another length have no three positions, so these are three classes at once."""
    np.savez(tmp_path / "mine.npz", X=inputs, y=MULTI_HOT)
    with pytest.raises(DataError, match=r"single-label classification.*multi-label"):
        load_task(tmp_path / "mine.npz")


def test_one_hot_labels_name_the_argmax():
    with pytest.raises(DataError, match=r"single-label classification.*pass their argmax"):
        from_arrays("mine", np.zeros((3, 2)), np.eye(3, dtype=np.int64))


def test_a_class_for_each_position_is_not_multi_label():
    words = np.zeros((20, 3), np.int64)
    assert from_arrays("tags", words, MULTI_HOT).labels.shape == (20, 3)
    assert from_arrays("tags", {"ids": words, "mask": words + 1}, MULTI_HOT).labels.shape == (20, 3)
    assert from_arrays("pixels", np.zeros((4, 2, 2)), np.ones((4, 2, 2), np.int64)).labels.shape == (4, 2, 2)
    assert from_arrays("plates", np.zeros((2, 8, 8)), [[4, 7, 0], [1, 1, 9]]).labels.shape == (2, 3)


def test_a_label_of_very_many_digits_is_a_text(tmp_path):
    """Python refuses to read such a number."""
    labels = np.array(["1", "9" * 5000])
    np.savez(
        tmp_path / "a.npz", inputs=np.zeros((2, 2)), labels=labels, test_inputs=np.zeros((1, 2)), test_labels=["2"]
    )
    assert load_task(f"npz:{tmp_path / 'a.npz'}").train.classes == ("1", "2", "9" * 5000)


def test_client_ids_beyond_64_bits_with_a_sign_are_refused(tmp_path):
    clients = np.array([1, 2**63 + 1], np.uint64)
    np.savez(tmp_path / "a.npz", inputs=np.zeros((2, 2)), labels=[0, 1], clients=clients)
    with pytest.raises(DataError, match=r"client ids must be below 2\^63, got 9223372036854775809"):
        load_task(f"npz:{tmp_path / 'a.npz'}")
