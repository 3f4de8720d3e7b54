"""Bundles: which files belong to one, that the same content has the same name, and that unpacking is safe."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evertick.bundles.bundle import MAX_FILE_BYTES, MAX_TOTAL_BYTES, Bundle, pack, unpack
from evertick.bundles.loader import load_file
from evertick.bundles.loader_process import find_closure
from evertick.domain.errors import InvalidDag


def fill(folder: Path, **files: str | bytes) -> None:
    """`fill(folder, lib__part_py="...")` writes lib/part.py."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def bundle_of(folder: Path, file: str = "x.py") -> Bundle:
    return pack(folder, file, find_closure(folder, file))


def contents(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# --- closure ---


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a", {"a.py"}),
        ("import a as b, p.m", {"a.py", "p/__init__.py", "p/m.py"}),
        ("from p import m", {"p/__init__.py", "p/m.py"}),
        ("from p.m import name", {"p/__init__.py", "p/m.py"}),
        ("from p import *", {"p/__init__.py"}),
        ("from n.deep import leaf", {"n/deep/leaf.py"}),
        ("def f():\n    if x:\n        import a", {"a.py"}),
        ("class C:\n    def m(self):\n        from p.m import z", {"p/__init__.py", "p/m.py"}),
        ("import importlib\nimportlib.import_module('p.m')", {"p/__init__.py", "p/m.py"}),
        ("__import__('a')", {"a.py"}),
        ("from . import a", {"a.py"}),
        ("from .p import m", {"p/__init__.py", "p/m.py"}),
        ("from ... import a", set()),
        ("import json, numpy, os.path", set()),
        ("import chain", {"chain.py", "a.py"}),
        ("import loop", {"loop.py"}),
        ("import broken", {"broken.py"}),
        ("this is not python", set()),
    ],
)
def test_the_closure_follows_imports_wherever_they_stand(tmp_path: Path, source: str, found: set[str]) -> None:
    fill(
        tmp_path,
        x_py=source,
        a_py="",
        p__m_py="",
        n__deep__leaf_py="",
        chain_py="import a",
        loop_py="import loop, x",
        broken_py="def (",
        unused_py="",
    )
    (tmp_path / "p" / "__init__.py").touch()
    assert set(find_closure(tmp_path, "x.py")) == found | {"x.py"}


def test_relative_imports_are_resolved_from_their_package(tmp_path: Path) -> None:
    fill(tmp_path, p__x_py="from . import a\nfrom .. import b\nfrom ..q import c", p__a_py="", b_py="", q__c_py="")
    assert find_closure(tmp_path, "p/x.py") == ("b.py", "p/a.py", "p/x.py", "q/c.py")


def test_modules_that_were_loaded_belong_to_the_closure_with_their_imports(tmp_path: Path) -> None:
    fill(tmp_path, x_py="", plugin_py="import a", a_py="")
    assert find_closure(tmp_path, "x.py", ["plugin.py", "gone.py"]) == ("a.py", "plugin.py", "x.py")


# --- packing ---


def test_a_bundle_holds_the_closure_and_all_data_but_nothing_hidden(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    fill(folder, x_py="import a", a_py="", unused_py="", data__rows_txt="1", notes_txt="")
    fill(folder / ".git", config="secret")
    fill(folder / "__pycache__", x="byte code")
    (folder / ".env").write_text("PASSWORD=1")
    (folder / "query.sql").write_text("select 1")
    bundle = bundle_of(folder)
    assert contents(unpack(bundle.archive, bundle.hash, tmp_path / "cache")) == {
        ".evertick-main",
        "x.py",
        "a.py",
        "data/rows.txt",
        "notes.txt",
        "query.sql",
    }


def test_the_same_content_has_the_same_hash_whatever_its_times_and_place(tmp_path: Path) -> None:
    for place in ("one", "two"):
        fill(tmp_path / place, x_py="import a", a_py="A = 1", data_txt="1")
    os.utime(tmp_path / "two" / "a.py", (1, 1))
    (tmp_path / "two" / "a.py").chmod(0o444)
    one, two = bundle_of(tmp_path / "one"), bundle_of(tmp_path / "two")
    assert one == two


@pytest.mark.parametrize("change", ["content", "data", "name", "mode", "main"])
def test_any_change_of_content_changes_the_hash(tmp_path: Path, change: str) -> None:
    fill(tmp_path, x_py="import a", a_py="import x", data_txt="1")
    before = bundle_of(tmp_path).hash
    match change:
        case "content":
            fill(tmp_path, a_py="import x  # changed")
        case "data":
            fill(tmp_path, data_txt="2")
        case "name":
            (tmp_path / "data.txt").rename(tmp_path / "other.txt")
        case "mode":
            (tmp_path / "data.txt").chmod(0o755)
    after = bundle_of(tmp_path, "a.py" if change == "main" else "x.py").hash
    assert before != after


def test_a_change_of_an_unused_module_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, x_py="", unused_py="")
    before = bundle_of(tmp_path).hash
    fill(tmp_path, unused_py="changed = True")
    assert bundle_of(tmp_path).hash == before


def test_a_large_file_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path, x_py="", big_txt=b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InvalidDag, match=r"big\.txt has more than 1,000,000 bytes"):
        bundle_of(tmp_path)


def test_a_large_folder_is_refused(tmp_path: Path) -> None:
    fill(
        tmp_path,
        x_py="",
        **{f"part{i}_txt": b"x" * MAX_FILE_BYTES for i in range(MAX_TOTAL_BYTES // MAX_FILE_BYTES + 1)},
    )
    with pytest.raises(InvalidDag, match="exceed 20,000,000 bytes"):
        bundle_of(tmp_path)


def test_links_to_files_count_by_content_and_links_to_folders_not_at_all(tmp_path: Path) -> None:
    fill(tmp_path / "dags", x_py="import linked")
    fill(tmp_path / "elsewhere", real_py="LINKED = 1", data_txt="1")
    (tmp_path / "dags" / "linked.py").symlink_to(tmp_path / "elsewhere" / "real.py")
    (tmp_path / "dags" / "data.txt").symlink_to(tmp_path / "elsewhere" / "data.txt")
    (tmp_path / "dags" / "circle").symlink_to(tmp_path / "dags")
    (tmp_path / "dags" / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "dags" / "pipe")
    bundle = bundle_of(tmp_path / "dags")
    target = unpack(bundle.archive, bundle.hash, tmp_path / "cache")
    assert contents(target) == {".evertick-main", "x.py", "linked.py", "data.txt"}
    assert not (target / "linked.py").is_symlink()


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../b", "./x.py"])
def test_a_closure_that_leads_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    fill(tmp_path / "dags", x_py="")
    fill(tmp_path, secret="s")
    with pytest.raises(InvalidDag, match="not a file of the DAGs folder"):
        pack(tmp_path / "dags", "x.py", [path])


def test_a_file_that_vanishes_meanwhile_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path, x_py="")
    with pytest.raises(InvalidDag, match=r"'gone\.py' cannot be published"):
        pack(tmp_path, "x.py", ["gone.py"])


# --- unpacking ---


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    fill(tmp_path / "dags", x_py="import lib.part\nVALUE = lib.part.__file__", lib__part_py="", data_txt="1")
    (tmp_path / "dags" / "run.sh").write_text("#!/bin/sh\necho ran")
    (tmp_path / "dags" / "run.sh").chmod(0o755)
    return bundle_of(tmp_path / "dags")


def test_unpacking_gives_private_files_and_keeps_what_can_be_executed(tmp_path: Path, bundle: Bundle) -> None:
    target = unpack(bundle.archive, bundle.hash, tmp_path / "cache")
    assert target == tmp_path / "cache" / bundle.hash
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "x.py").stat().st_mode & 0o777 == 0o600
    assert subprocess.check_output([target / "run.sh"], text=True) == "ran\n"


def test_unpacked_code_is_compiled_for_its_final_place(tmp_path: Path, bundle: Bundle) -> None:
    target = unpack(bundle.archive, bundle.hash, tmp_path / "cache")
    (compiled,) = (target / "lib" / "__pycache__").iterdir()
    assert str(target / "lib" / "part.py").encode() in compiled.read_bytes()
    script = "import sys; sys.path.insert(0, sys.argv[1]); import x; print(x.VALUE)"
    shown = subprocess.check_output([sys.executable, "-v", "-c", script, target], text=True, stderr=subprocess.STDOUT)
    assert f"# {target}/__pycache__" in shown.replace("'", ""), "the byte code was not used"
    assert shown.rstrip().count(str(target / "lib" / "part.py"))


def test_a_module_that_does_not_compile_can_still_be_unpacked(tmp_path: Path) -> None:
    fill(tmp_path / "dags", x_py="def (")
    broken = bundle_of(tmp_path / "dags")
    assert (unpack(broken.archive, broken.hash, tmp_path / "cache") / "x.py").read_text() == "def ("


def test_unpacking_again_changes_nothing(tmp_path: Path, bundle: Bundle) -> None:
    target = unpack(bundle.archive, bundle.hash, tmp_path / "cache")
    before = (target / "x.py").stat().st_mtime_ns
    assert unpack(b"not even read", bundle.hash, tmp_path / "cache") == target
    assert (target / "x.py").stat().st_mtime_ns == before


def test_many_may_unpack_at_once(tmp_path: Path, bundle: Bundle) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: unpack(bundle.archive, bundle.hash, tmp_path / "cache"), range(16)))
    assert set(results) == {tmp_path / "cache" / bundle.hash}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [bundle.hash]


def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path: Path, bundle: Bundle) -> None:
    changed = gzip.compress(gzip.decompress(bundle.archive).replace(b"VALUE", b"VALVE"))
    damaged = [b"", b"junk", bundle.archive[:-20], changed, gzip.compress(b"")]
    for archive in damaged:
        with pytest.raises(InvalidDag, match="is damaged"):
            unpack(archive, bundle.hash, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["", "../../x", "A" * 64, "0" * 63])
def test_a_hash_that_is_none_is_refused(tmp_path: Path, bundle: Bundle, name: str) -> None:
    with pytest.raises(InvalidDag, match="not the hash of a bundle"):
        unpack(bundle.archive, name, tmp_path / "cache")


def evil_archive(header: tarfile.TarInfo, content: bytes = b"") -> tuple[bytes, str]:
    """An archive whose hash is right, so that only the check of its paths stands in the way."""
    packed = io.BytesIO()
    header.size = len(content)
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(header, io.BytesIO(content))
    digest = hashlib.sha256(f"{header.name}\0-\0{len(content)}\0".encode() + content).hexdigest()
    return gzip.compress(packed.getvalue()), digest


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", "..", "."])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    archive, digest = evil_archive(tarfile.TarInfo(name), b"x")
    with pytest.raises(InvalidDag, match="is damaged"):
        unpack(archive, digest, tmp_path / "cache")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_anything_but_plain_files_is_refused(tmp_path: Path, kind: bytes) -> None:
    header = tarfile.TarInfo("entry")
    header.type = kind
    header.linkname = "/etc/passwd"
    archive, digest = evil_archive(header)
    with pytest.raises(InvalidDag, match="is damaged"):
        unpack(archive, digest, tmp_path / "cache")


def test_an_archive_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * (MAX_TOTAL_BYTES * 4), compresslevel=1)
    with pytest.raises(InvalidDag, match="is damaged"):
        unpack(bomb, "0" * 64, tmp_path / "cache")


async def test_unpacked_code_gives_the_dag_that_was_published(tmp_path: Path) -> None:
    fill(
        tmp_path / "dags",
        sub__x_py="from lib.tasks import work\nfrom evertick import dag\n@dag\ndef one(): work()\n",
        lib__tasks_py="from evertick import task\n@task\ndef work(): ...\n",
    )
    published = await load_file(tmp_path / "dags", "sub/x.py")
    bundle = pack(tmp_path / "dags", "sub/x.py", published.closure)
    target = unpack(bundle.archive, bundle.hash, tmp_path / "cache")
    loaded = await load_file(target, "sub/x.py")
    assert loaded == published
    assert [dag.name for dag in loaded.dags] == ["one"]


def sparse(real_bytes: int) -> bytes:
    """An archive whose one file is nothing but a hole of that size."""
    header = tarfile.TarInfo("x.py")
    header.pax_headers = {"GNU.sparse.size": str(real_bytes), "GNU.sparse.map": f"{real_bytes},0"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(header)
    return gzip.compress(packed.getvalue())


def test_a_hole_that_would_be_read_as_terabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDag, match="not a plain file"):
        unpack(sparse(10**13), "0" * 64, tmp_path / "cache")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("x.py"), io.BytesIO())
    with pytest.raises(InvalidDag, match="two files with the same name"):
        unpack(gzip.compress(packed.getvalue()), "0" * 64, tmp_path / "cache")
