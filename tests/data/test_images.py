from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from drivetrain.config.workload import ImageData
from drivetrain.data.image_sources import class_folders, pictures_to_predict, read_pictures
from drivetrain.data.images import file_pictures, resized, with_channels
from drivetrain.errors import RunError, UserError


def save(path: Path, image: Image.Image | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (4, 4))).save(path)
    return path


def words(root: Path) -> str:
    with pytest.raises(UserError) as error:
        class_folders(root, "workload.data.train", "train")
    assert error.value.problems[0].field == "workload.data.train"
    return error.value.problems[0].why


def read(path: Path, size: int | None = None) -> np.ndarray:
    return file_pictures([str(path)], [path.name]).pixels(0, size)


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_with_grey_values_up_to_255() -> None:
    digits = read_pictures(ImageData(source="digits"), None, "field", "train")
    original = load_digits()
    assert len(digits.labels) == 1797
    assert digits.labels[:4].tolist() == ["0", "1", "2", "3"]
    assert digits.classes == tuple("0123456789")
    for index in (0, 1796):
        image = digits.pictures.pixels(index, None)
        assert image.shape == (8, 8, 1)
        np.testing.assert_allclose(image[..., 0] / 255, original.images[index] / 16, atol=0.5 / 255)
    assert digits.pictures.pixels(0, 32).shape == (32, 32, 1)


# --- class folders ---------------------------------------------------------------------------------------------------


def test_folders_are_classes_at_any_depth_and_in_any_format(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/more/2.JPG", "dog/3.webp", "dog/4.bmp", "dog/5.tiff", "dog/6.gif"):
        save(tmp_path / name)
    found = class_folders(tmp_path, "field", "train")
    assert found.labels.tolist() == ["cat", "cat", "dog", "dog", "dog", "dog"]
    assert list(found.pictures.names) == [
        "cat/1.png",
        "cat/more/2.JPG",
        "dog/3.webp",
        "dog/4.bmp",
        "dog/5.tiff",
        "dog/6.gif",
    ]
    assert all(found.pictures.pixels(i, None).shape == (4, 4, 3) for i in range(6))
    assert found.notes == ()


def test_other_files_are_left_out_and_reported_but_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/2.png", ".cache/3.png", "cat/.thumbnails/4.png", "__MACOSX/5.png"):
        save(tmp_path / name)
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".DS_Store").write_text("x")
    (tmp_path / "README.md").write_text("x")
    found = class_folders(tmp_path, "field", "train")
    assert list(found.pictures.names) == ["cat/1.png", "dog/2.png"]
    assert len(found.notes) == 1
    assert found.notes[0].startswith("1 file ")
    assert "notes.txt" in found.notes[0]


def test_files_that_are_no_images_are_counted_by_their_endings(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        save(tmp_path / name)
    for name in ("cat/1.txt", "dog/2.txt", "dog/3.heic", "dog/LICENSE"):
        (tmp_path / name).write_text("x")
    (note,) = class_folders(tmp_path, "field", "train").notes
    assert note.startswith(
        f"4 files in {tmp_path} left out, which are no images: 2 .txt ({tmp_path / 'cat/1.txt'} first), "
    )
    assert f"1 .heic ({tmp_path / 'dog/3.heic'} first), 1 without ending" in note


LOOPS = {  # a link → where it leads
    "itself": ("all", "."),
    "itself by its full path": ("all", "{root}"),
    "what holds it": ("above", ".."),
    "a sibling class, named before it": ("a_cat", "cat"),
    "a sibling class, named behind it": ("kitten", "cat"),
    "a folder within a sibling": ("more", "cat/more"),
    "a folder in a class, to that class": ("cat/again", "."),
    "a folder in a class, to another": ("cat/dogs", "../dog"),
    "a folder in a class, to all": ("cat/more/all", "../.."),
}


@pytest.mark.parametrize(("link", "to"), LOOPS.values(), ids=LOOPS)
def test_a_link_to_a_folder_that_is_read_anyway_adds_nothing_and_is_named(tmp_path: Path, link: str, to: str) -> None:
    root = tmp_path / "data"
    for name in ("cat/1.png", "cat/more/2.png", "dog/3.png"):
        save(root / name)
    save(tmp_path / "test/cat/4.png")
    plain = class_folders(root, "field", "train")
    (root / link).symlink_to(to.format(root=root))
    found = class_folders(root, "field", "train")
    assert (found.labels.tolist(), list(found.pictures.names)) == (plain.labels.tolist(), list(plain.pictures.names))
    (note,) = found.notes
    assert f"are left out: {link} → " in note
    assert not plain.notes


def test_links_to_elsewhere_are_read_like_folders_each_place_once(tmp_path: Path) -> None:
    for name in (
        "root/cat/1.png",
        "store/cats/2.png",
        "store/dogs/3.png",
        "store/birds/4.png",
        "store/birds/sub/5.png",
    ):
        save(tmp_path / name)
    root, store = tmp_path / "root", tmp_path / "store"
    (root / "cat" / "more").symlink_to(store / "cats")
    (root / "dog").symlink_to(store / "dogs")
    (root / "cat" / "one.png").symlink_to(store / "dogs" / "3.png")
    for name in ("bird", "fowl"):
        (root / name).symlink_to(store / "birds")
    found = class_folders(root, "field", "train")
    assert list(found.pictures.names) == [
        *("bird/4.png", "bird/sub/5.png", "cat/1.png", "cat/one.png", "cat/more/2.png", "dog/3.png"),
    ]
    assert found.labels.tolist() == ["bird", "bird", "cat", "cat", "cat", "dog"]
    (note,) = found.notes
    assert f"fowl → {store / 'birds'}" in note
    (store / "birds" / "sub" / "loop").symlink_to(store)
    again = class_folders(root, "field", "train")
    assert sorted(again.pictures.names) == sorted(found.pictures.names), "its folders are read, so each is left out"


def test_a_folder_of_splits_gives_the_split_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png"):
        save(tmp_path / name)
    assert list(class_folders(tmp_path, "field", "train").pictures.names) == ["cat/1.png", "dog/2.png"]
    assert list(class_folders(tmp_path, "field", "test").pictures.names) == ["cat/3.png"]


def test_a_folder_without_classes_or_images_is_reported(tmp_path: Path) -> None:
    assert "is no folder" in words(tmp_path / "nowhere")
    assert "holds no images" in words(tmp_path)
    (tmp_path / "cat").mkdir()
    assert "holds no images" in words(tmp_path)
    save(tmp_path / "1.png")
    assert "1 images but no class folders" in words(tmp_path)


def test_the_real_cifar_folder_is_read(shared_data: Path, tmp_path: Path) -> None:
    import tarfile

    wanted = 30
    with tarfile.open(shared_data / "CIFAR-10-images.tar.xz") as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                picture = archive.extractfile(member)
                assert picture is not None
                (tmp_path / member.name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / member.name).write_bytes(picture.read())
                wanted -= 1
            if not wanted:
                break
    root = tmp_path / "CIFAR-10-images"
    found = class_folders(root if (root / "train").is_dir() else root / "test", "field", "train")
    assert len(found.labels) == 30
    assert all(found.pictures.pixels(i, None).shape == (32, 32, 3) for i in range(30))


# --- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("image.tiff" if mode in {"CMYK", "I;16"} else "image.png")
    if mode == "I;16":
        image = Image.fromarray(np.full((3, 5), 200 << 8, dtype=np.uint16))
    else:
        image = Image.new("RGB", (5, 3), (255, 255, 255)).convert(mode)
    save(path, image)
    pixels = read(path)
    assert pixels.shape == (3, 5, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == (200 if mode == "I;16" else 255)).all()


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "image.png", transparency=b"\x00\xff")
    assert read(tmp_path / "image.png")[0, 0].tolist() == [255, 0, 0]


def test_a_photograph_is_turned_as_the_camera_was_held(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    Image.new("RGB", (6, 4)).save(tmp_path / "photo.jpg", exif=exif)
    pictures = file_pictures([str(tmp_path / "photo.jpg")], ["photo.jpg"])
    assert pictures.pixels(0, None).shape == (6, 4, 3)
    assert pictures.dimensions(0) == (6, 4)


def test_resizing_keeps_the_proportions_and_the_middle() -> None:
    wide = Image.new("RGB", (40, 20), "black")
    wide.paste("white", (10, 0, 30, 20))  # the middle square
    out = np.asarray(resized(wide, 10))
    assert out.shape == (10, 10, 3)
    assert out[:, 1:-1].min() == 255


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = Image.new("L", (8, 8))
    assert resized(image, 8) is image
    assert resized(image, None) is image


def test_grey_is_repeated_and_colours_become_pils_grey() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    np.testing.assert_array_equal(with_channels(pixels, 1)[..., 0], np.asarray(Image.fromarray(pixels).convert("L")))
    grey = pixels[..., :1]
    assert (with_channels(grey, 3) == grey).all()
    assert with_channels(pixels, 3) is pixels


@pytest.mark.parametrize("kind", ["cut", "text", "empty", "missing", "32 bits"])
def test_what_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.png"
    held = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)).save(held, "PNG")
    content = {"cut": held.getvalue()[:1000], "text": b"no image", "empty": b""}
    if kind in content:
        path.write_bytes(content[kind])
    elif kind == "32 bits":
        Image.fromarray(np.zeros((3, 3), dtype=np.int32)).save(tmp_path / "deep.tiff")
        (tmp_path / "deep.tiff").rename(path)
    with pytest.raises(RunError, match=r"broken\.png cannot be read as an image"):
        read(path)


def test_postscript_is_not_run_whatever_its_file_is_called(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "image.eps")
    with Image.open(tmp_path / "image.eps") as image:
        assert image.format == "EPS"
    (tmp_path / "image.eps").rename(tmp_path / "image.png")
    pictures = file_pictures([str(tmp_path / "image.png")], ["image.png"])
    for read_it in (lambda: pictures.dimensions(0), lambda: pictures.pixels(0, None)):
        with pytest.raises(RunError, match=r"image\.png cannot be read"):
            read_it()


# --- to predict for --------------------------------------------------------------------------------------------------


def test_images_to_predict_for_may_lie_flat_in_class_folders_or_alone(tmp_path: Path) -> None:
    config = ImageData(source="digits")
    for name in ("b.png", "a.png", "cat/c.png"):
        save(tmp_path / name)
    assert list(pictures_to_predict(config, str(tmp_path), "--data").names) == ["a.png", "b.png", "cat/c.png"]
    alone = str(tmp_path / "a.png")
    assert list(pictures_to_predict(config, alone, "--data").names) == [alone]


def test_images_to_predict_for_may_lie_behind_links(tmp_path: Path) -> None:
    save(tmp_path / "store/1.png")
    save(tmp_path / "mine/2.png")
    (tmp_path / "mine" / "more").symlink_to(tmp_path / "store")
    (tmp_path / "mine" / "loop").symlink_to(".")
    (tmp_path / "link").symlink_to("mine")
    for name in ("mine", "link"):
        found = pictures_to_predict(ImageData(source="folder", train="x"), str(tmp_path / name), "--data")
        assert list(found.names) == ["2.png", "more/1.png"]


def test_nothing_to_predict_for_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError) as error:
            pictures_to_predict(ImageData(source="digits"), str(path), "--data")
        assert error.value.problems[0].field == "--data"
