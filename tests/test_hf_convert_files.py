"""wavepe.hf.convert: the files that it copies or changes, and those of an interruption."""

import errno
import os
import shutil
import signal
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
import wavepe.hf
from convert_cases import IDS, OTHERS, load, names, read, refused, state, stock
from hf_model import logits, tiny
from processes import forked
from wavepe.hf import conversion, convert


# ------------------------------------------------------------------ files
def test_other_files_come_along(tmp_path):
    source = stock(tmp_path / "source", "sharded")
    weights = [name for name in names(source) if name.startswith("model")]
    stale = ["pytorch_model.bin", "optimizer.pt", "original/consolidated.00.pth", "model.gguf"]
    checkpoint = ["checkpoint-5/config.json", "checkpoint-5/tokenizer.json"]
    passed_over = [".env", ".git/config", "original/.netrc", *checkpoint]
    for name in stale + passed_over:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    done = convert(source, tmp_path / "target", "alibi")
    assert sorted(done.left_out) == sorted(stale)
    same = [*weights, *OTHERS, "generation_config.json"]
    ours = ["config.json", "modeling_wavepe.py", "README.md"]
    assert names(tmp_path / "target") == sorted([*same, *ours])
    for name in same:
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


def test_weights_are_copies_unless_links_are_asked_for(tmp_path):
    source = stock(tmp_path / "models--a--b" / "blobs", "sharded")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"  # links, as in the Hub's cache
    for name in names(source):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(source / name, (snapshot / name).parent))
    for link in (False, True):
        target = tmp_path / f"target-{link}"
        assert not convert(snapshot, target, "shaw:clip=3", link=link).left_out
        for path in source.glob("*.safetensors"):
            assert path.samefile(target / path.name) == link
        assert {*OTHERS} <= {*names(target)}
        assert not any(path.is_symlink() for path in target.rglob("*"))
        load(target)
    for path in target.glob("*.json"):
        assert path.stat().st_nlink == 1
    (tmp_path / "models--a--b" / "refs").mkdir()
    shutil.copy(source / "config.json", tmp_path / "models--a--b" / "refs" / "main")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../refs/main")
    refused(snapshot, tmp_path / "other", "config.json is a symbolic link that leads out")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    repository = (tmp_path / "models--a--b").rename(tmp_path / "moved")
    (tmp_path / "models--a--b").symlink_to(repository)
    assert not convert(snapshot, tmp_path / "from-moved", "alibi").left_out
    (repository / "blobs").rename(tmp_path / "private")
    (repository / "blobs").symlink_to(tmp_path / "private")
    refused(snapshot, tmp_path / "other", "config.json is a symbolic link that leads out")


@pytest.mark.parametrize("link", [False, True])
def test_links_that_lead_out_of_the_folder(link, tmp_path, monkeypatch):
    source, secret = stock(tmp_path / "source", "sharded"), tmp_path / "secret"
    (source / "sub").mkdir()
    secret.write_text("key")
    (source / "chain.txt").symlink_to("sub/absolute.txt")
    (source / "sub" / "absolute.txt").symlink_to(secret)
    (source / "sub" / "relative.txt").symlink_to("../../secret")
    (source / "sub" / "around.txt").symlink_to("../../source/tokenizer.json")
    (source / "folder").symlink_to(tmp_path)
    (source / "loop").symlink_to("loop")
    (source / "README.md").symlink_to(secret)
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("password")
    (source / "git.txt").symlink_to(".git/config")
    (tmp_path / ".target.part").symlink_to(source)
    done = convert(source, tmp_path / "target", "alibi", link=link)
    outside = ["README.md", "chain.txt", "git.txt", "sub/absolute.txt", "sub/relative.txt"]
    assert done.left_out == tuple(sorted(["folder", "loop", *outside]))
    (tmp_path / "target" / ".README.md.part.md").symlink_to(secret)
    load(tmp_path / "target").save_pretrained(tmp_path / "target")
    assert secret.read_text() == "key"
    assert (tmp_path / "target" / "sub" / "around.txt").read_text() == "{}"
    assert "alibi" in (tmp_path / "target" / "README.md").read_text()
    first = min(path.name for path in source.glob("*.safetensors"))
    for name in ("config.json", "model.safetensors.index.json", first):
        kept = (source / name).rename(tmp_path / "kept")
        (source / name).symlink_to(kept)
        refused(source, tmp_path / "other", f"{name} is a symbolic link that leads out", link=link)
        kept.replace(source / name)

    def swap(*args):  # after the weights were read, and before they are copied
        (source / first).unlink()
        (source / first).symlink_to(secret)

    monkeypatch.setattr(conversion, "write_beside", swap)
    with pytest.raises(ValueError, match="is a symbolic link that leads out"):
        convert(source, tmp_path / "other", "alibi", link=link)
    assert not (tmp_path / "other").exists()


def test_stored_frequencies_of_old_llamas_are_dropped(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = tiny()
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}
    model.save_pretrained(source)
    path = source / "model.safetensors"
    safetensors.torch.save_file(state(source) | old, path, {"format": "pt"})
    done = convert(source, target, "alibi")
    assert done.dropped == tuple(old)
    assert torch.equal(logits(load(target), IDS), logits(wavepe.hf.patch(model, "alibi"), IDS))


def test_weights_are_never_loaded(tmp_path, monkeypatch):
    """A file is copied, or written anew from tensors that are mapped to memory."""
    source, learned = tmp_path / "source", tmp_path / "learned"
    model = tiny(vocab_size=150_000).bfloat16()
    model.save_pretrained(source)
    wavepe.hf.patch(model, "shaw:clip=3").save_pretrained(learned)
    written, save_file = {}, safetensors.torch.save_file

    def save(tensors, path, metadata):
        written.update({name: file_of(x.data_ptr()) for name, x in tensors.items()})
        save_file(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    tracemalloc.start()
    try:
        added = convert(source, tmp_path / "a", "transformer_xl").added
        assert set(written) == set(added)
        written.clear()
        convert(learned, tmp_path / "b", "alibi")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    before, after = state(source), state(tmp_path / "b")
    assert sum(x.nbytes for x in before.values()) > 14_000_000
    assert written == dict.fromkeys(before, str(learned / "model.safetensors"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def file_of(address):
    """Return the file that is mapped to memory at this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split(maxsplit=5)[-1]
    raise AssertionError("no memory")


# ------------------------------------------------------------------ what goes wrong on the way
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(error, tmp_path, monkeypatch):
    source = stock(tmp_path / "source", "sharded")
    copied, copyfile = [], shutil.copyfile

    def fail(file, target, **options):
        copied.append(target)
        if len(copied) == 9:
            raise error
        return copyfile(file, target, **options)

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "not" / "there", "alibi")
    assert len(copied) == 9
    assert list(tmp_path.iterdir()) == [source]


# Gets a signal before the third file is copied, SIGHUP in a finalizer; argv: signal, source, target
STOPPED = """
import os, shutil, signal, sys, time
from wavepe.hf import convert

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
copied, copyfile, number = [], shutil.copyfile, int(sys.argv[1])


class Finalized:
    def __del__(self):
        os.kill(os.getpid(), number)


def stopping(file, target, **options):
    copied.append(file)
    if len(copied) == 3:
        Finalized() if number == signal.SIGHUP else os.kill(os.getpid(), number)
        time.sleep(60)
    return copyfile(file, target, **options)


shutil.copyfile = stopping
convert(sys.argv[2], sys.argv[3], "alibi")
"""


def test_what_a_signal_leaves(tmp_path):
    """A signal leaves no file. SIGKILL leaves a folder, which the next call uses."""
    source, target = stock(tmp_path / "source", "sharded"), tmp_path / "new" / "target"
    for number in (signal.SIGTERM, signal.SIGHUP):
        done = forked("-c", STOPPED, int(number), source, target)
        assert (done.returncode, done.stderr) == (-number, "")
        assert list(tmp_path.iterdir()) == [source]
    for _ in range(2):
        assert forked("-c", STOPPED, int(signal.SIGKILL), source, target).returncode == -9
        assert [path.name for path in target.parent.iterdir()] == [".target.part"]
    convert(source, target, "alibi")
    assert list(target.parent.iterdir()) == [target]
    load(target)


def test_modes_and_links(tmp_path):
    source, target = stock(tmp_path / "source", "sharded"), tmp_path / "target"
    weights = sorted(path.name for path in source.glob("*.safetensors"))
    (source / weights[0]).chmod(0o640)
    (source / "modeling_wavepe.py").touch(0o400)
    (source / "gone.json").symlink_to("nowhere")
    (tmp_path / "more").mkdir()
    (source / "linked").symlink_to(tmp_path / "more")
    target.mkdir(mode=0o700)
    done = convert(source, target, "shaw:clip=3")
    assert {"gone.json", "linked"} <= set(done.left_out)
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / weights[0]).stat().st_mode & 0o777 == 0o640
    for new in ("model-position-encoding.safetensors", "modeling_wavepe.py"):
        assert (target / new).stat().st_mode == (target / "config.json").stat().st_mode


def test_targets_that_cannot_be_replaced(tmp_path, monkeypatch):
    source = stock(tmp_path / "source")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused(source, Path(), "must not be the current folder")
    monkeypatch.setattr(os.path, "ismount", lambda path: path.name == "disk")
    refused(source, tmp_path / "disk", "a mount point, got .*disk")


def test_two_at_once(tmp_path, monkeypatch):
    source, target = stock(tmp_path / "source"), tmp_path / "target"
    write = conversion._write_weights

    def meanwhile(*args):
        monkeypatch.setattr(conversion, "_write_weights", write)
        with pytest.raises(OSError, match=r"another process is writing there: .*target'"):
            convert(source, target, "none")
        write(*args)

    monkeypatch.setattr(conversion, "_write_weights", meanwhile)
    convert(source, target, "alibi")
    assert read(target / "config.json")["position_encoding"] == "alibi"


def test_a_target_that_another_process_fills_meanwhile(tmp_path, monkeypatch):
    source, target = stock(tmp_path / "source"), tmp_path / "target"

    def fill(*args):
        target.mkdir()
        (target / "of-another-process").touch()

    monkeypatch.setattr(conversion, "_write_weights", fill)
    with pytest.raises(OSError, match="not empty"):
        convert(source, target, "alibi")
    assert names(target) == ["of-another-process"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
