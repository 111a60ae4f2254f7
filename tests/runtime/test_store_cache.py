"""Copies of what stores hold: fetched once, again where they changed, and removed beyond the cache's bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.data import remote_sources
from drivetrain.errors import UserError
from drivetrain.runtime.object_store import ObjectStore
from drivetrain.runtime.store_cache import Source, address_of, local_path, with_addresses


def fetch(address: str, *names: str) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return Source(address, names or (address,)).fetch("workload.data.train", lines.append), lines


def filled(bucket: str, folder: Path, **files: bytes) -> ObjectStore:
    store = ObjectStore(bucket)
    for name, content in files.items():
        file = folder / name
        file.write_bytes(content)
        store.upload(name.replace("__", "/").replace("_", "."), file)
    return store


def test_only_what_changed_is_fetched_again(bucket: str, tmp_path: Path) -> None:
    store = filled(bucket, tmp_path, d__a_txt=b"a", d__b_txt=b"b", dd__c_txt=b"c")
    path, lines = fetch(f"{bucket}/d")
    assert sorted(each.name for each in path.iterdir()) == ["a.txt", "b.txt"], "a folder that begins alike is another"
    assert "fetching" in lines[0]
    assert fetch(f"{bucket}/d")[1] == []
    (tmp_path / "new").write_bytes(b"B")
    store.upload("d/b.txt", tmp_path / "new")
    store.delete(["d/a.txt"])
    path, lines = fetch(f"{bucket}/d")
    assert [each.read_bytes() for each in path.iterdir()] == [b"B"]
    assert len(lines) == 1


def test_an_object_and_patterns_are_found_where_their_address_says(bucket: str, tmp_path: Path) -> None:
    filled(bucket, tmp_path, d__a_txt=b"a", d__b_txt=b"b", d__b_csv=b"c", d__e__f_txt=b"f")
    path, _ = fetch(f"{bucket}/d/a.txt")
    assert path.read_bytes() == b"a"
    path, _ = fetch(f"{bucket}/d/*.txt")
    assert sorted(each.name for each in path.parent.glob(path.name)) == ["a.txt", "b.txt"]
    fetch(f"{bucket}/d/{{a,b}}.*", f"{bucket}/d/a.*", f"{bucket}/d/b.*")
    assert (path.parent / "b.csv").exists()
    assert not (path.parent / "e").exists()


def test_an_address_and_the_path_of_its_copy_name_one_another(bucket: str) -> None:
    address = f"{bucket}/folder/file.txt"
    assert address_of(str(local_path(address))) == address
    assert address_of("/elsewhere/file") is None
    run = {"data": {"train": str(local_path(address)), "lines": [1, "x"]}}
    assert with_addresses(run) == {"data": {"train": address, "lines": [1, "x"]}}


def test_nothing_at_an_address_is_an_error_of_its_field(bucket: str) -> None:
    with pytest.raises(UserError, match="there is nothing at"):
        fetch(f"{bucket}/nothing")


def test_the_cache_keeps_its_bound_but_nothing_in_use_is_removed(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(bucket, tmp_path, one=b"1" * 1000, two=b"2" * 1000, three=b"3" * 1000)
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", "0.000002")  # 2,000 bytes
    script = "import sys; from drivetrain.runtime.store_cache import Source; " + (
        f"Source('{bucket}/one', ['{bucket}/one']).fetch('x', print)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # another process, which has ended
    two, _ = fetch(f"{bucket}/two")
    assert local_path(f"{bucket}/one").exists()
    fetch(f"{bucket}/three")
    assert not local_path(f"{bucket}/one").exists(), "the bound of two objects"
    assert two.exists(), "this process uses it"
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", "0.0000005")
    with pytest.raises(UserError, match="DRIVETRAIN_STORE_CACHE_GB"):
        fetch(f"{bucket}/two")


def test_names_of_braces_that_are_missing_are_an_error_and_many_are_listed_once(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(bucket, tmp_path, **{f"d__{number:02d}_txt": b"x" for number in range(20)}, e__x_txt=b"x")
    with pytest.raises(UserError, match=r"1 of the 2 names of .* are not there: d/20\.txt"):
        fetch(f"{bucket}/d/{{19,20}}.txt", f"{bucket}/d/19.txt", f"{bucket}/d/20.txt")
    monkeypatch.setattr(ObjectStore, "entry", None)  # none is looked up by itself
    names = [f"{bucket}/d/{number:02d}.txt" for number in range(20)]
    store, listed = ObjectStore(bucket), Source(f"{bucket}/many", [*names, f"{bucket}/d/*9.txt", f"{bucket}/e"])
    assert [each.path for each in listed.entries(store, "x")][-1] == "e/x.txt"
    assert len(listed.entries(store, "x")) == 21
    with pytest.raises(UserError, match="2 of the 22 names"):
        Source(f"{bucket}/many", [*names, f"{bucket}/d/2", f"{bucket}/absent"]).entries(store, "x")


def test_numbers_in_braces_that_are_a_slip_of_the_pen_are_refused(bucket: str) -> None:
    with pytest.raises(UserError, match="stands for 1,000,000,000 files"):
        remote_sources.fetch(f"{bucket}/{{000000000..999999999}}.tar", "workload.data.train", print)


def test_a_copy_that_another_source_holds_too_stays(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(bucket, tmp_path, d__a_txt=b"a" * 1000, d__b_txt=b"b" * 1000, big=b"c" * 1000)
    script = "import sys; from drivetrain.runtime.store_cache import Source; " + (
        f"Source('{bucket}/d', ['{bucket}/d']).fetch('x', print)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # another process, which has ended
    one, _ = fetch(f"{bucket}/d/a.txt")
    monkeypatch.setenv("DRIVETRAIN_STORE_CACHE_GB", "0.000002")  # 2,000 bytes
    fetch(f"{bucket}/big")
    assert one.exists()
    assert not local_path(f"{bucket}/d/b.txt").exists()
    fetch(f"{bucket}/*", f"{bucket}/d/a.txt")
    store.delete(["d/a.txt"])
    (tmp_path / "more").write_bytes(b"m")
    store.upload("d/c.txt", tmp_path / "more")
    fetch(f"{bucket}/*", f"{bucket}/d/c.txt")
    assert one.exists(), "the other source has it"
