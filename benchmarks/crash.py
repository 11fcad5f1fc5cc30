"""What a store survives: kills at random moments, damaged files, full disks, two writers, hostile files.

    python benchmarks/crash.py benchmarks/results/crash.json

Each trial checks what must hold, and stops the program with an error if it does not:

    kill      a forked writer (or a compaction) is killed with SIGKILL at a random moment.  Every finished shard reads
              as it was written, all rows that a flush had confirmed are there, none twice, the index is rebuilt when it
              is torn, and the run, resumed, completes.
    damage    a random shard has a bit flipped, its end cut off, its end overwritten with zeros, or its middle replaced.
              Either `damages` names it, and the other shards read exactly; or the store reads exactly as before,
              because the byte is one that HDF5 does not use.
    disk      on a small tmpfs (a limit on the file size where it cannot be mounted): the error reaches the caller, what
              was finished reads, and with room made all rows are there.
    readonly  a store on a read-only file system opens without an index, and refuses to be written.
    writers   two writers at once: different runs both complete, the same run is refused to the second.
    hostile   an index with paths to elsewhere, a shard that is a link, a pickle: none is followed or executed.
"""

import argparse
import json
import os
import pickle
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from attrax.core import Block, Examples, GradTree, factorized, materialized
from attrax.core.schema import SCHEMA
from attrax.frontends.storage.compaction import compact_store
from attrax.frontends.storage.damages import damages
from attrax.frontends.storage.index import enclosed
from attrax.frontends.storage.store import open_store, store

TOTAL, EACH = 32, 8


def rows(n: int) -> torch.Tensor:
    """A matrix that is recognized, and different in every entry."""
    return torch.cos(torch.arange(60, dtype=torch.float64).reshape(3, 20) * 0.51 + n * 2.17)


def block(n: int) -> Block:
    """The n-th example: a projected gradient and rows of a layer."""
    leaves = {"w": materialized("w", rows(n)[None]), "fc": factorized("fc", rows(n)[None], rows(n + 1)[None])}
    return Block(GradTree(leaves), Examples((str(n),), step=n, fingerprint="p"))


def values(name: str, leaf: Any, examples: Examples) -> Any:
    """The arrays of a leaf, by field."""
    return leaf


def exact(folder: Path, **options: Any) -> list[int]:
    """Numbers of the rows that a store gives back, each of them checked."""
    found: list[int] = []
    for examples, leaves in open_store(folder, **options).map(values):
        for k, n in enumerate(map(int, examples.ids)):
            assert torch.equal(leaves["w"].w[k], rows(n)), n
            assert torch.equal(leaves["fc"].a[k], rows(n)) and torch.equal(leaves["fc"].g[k], rows(n + 1)), n
            found.append(n)
    assert len(found) == len(set(found))
    return found


def write(
    folder: Path, numbers: range | list[int], say: Callable[[int], object] = lambda n: None, **options: Any
) -> None:
    """Write rows, flushing after every eighth."""
    with store(folder, keep_factored=True, **options) as sink:
        for n in numbers:
            sink(block(n))
            if n % EACH == EACH - 1:
                sink.flush()
                say(n)


def forked(work: Callable[[Callable[[int], object]], object]) -> tuple[int, int]:
    """Run a function in a child; returns its id, and where to read the numbers it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            work(lambda n: os.write(writer, f"{n} ".encode()))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    return child, reader


def said(reader: int) -> list[int]:
    """All numbers that a child said, after its end."""
    with os.fdopen(reader) as file:
        return [int(n) for n in file.read().split()]


def shards(folder: Path) -> list[Path]:
    """Its shards, by name."""
    return sorted(folder.glob("*.shard.h5"))


def killed(folder: Path, chooser: random.Random, longest: float) -> str:
    """One kill; returns what was being done."""
    compacting = chooser.random() < 0.3
    if compacting:
        write(folder, range(TOTAL), run="r", shard_examples=4)
        child, reader = forked(lambda say: compact_store(folder, shard_bytes=20_000))
    else:
        child, reader = forked(lambda say: write(folder, range(TOTAL), say, run="r", shard_examples=3))
    time.sleep(chooser.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    last = max(said(reader), default=-1)
    ended = "finished before" if os.WIFEXITED(status) else "killed"
    if shards(folder):
        (folder / "index.json").write_text('{"torn')
        assert not damages(folder), damages(folder)
        found = exact(folder)
        assert found == list(range(TOTAL if compacting else len(found))) and len(found) > last, (found, last)
        assert json.loads((folder / "index.json").read_text())["schema"] == SCHEMA
    else:
        assert last < 0 and not compacting
        found = []
    write(folder, range(len(found), TOTAL), run="r")
    compact_store(folder)
    assert exact(folder) == list(range(TOTAL)) and not damages(folder)
    assert {p.suffix for p in folder.iterdir()} == {".h5", ".json"}, list(folder.iterdir())
    return f"{'compaction' if compacting else 'writer'} {ended}"


def damaged(whole: Path, folder: Path, chooser: random.Random) -> str:
    """One damage to a copy of a store; returns what it was, and whether it was named."""
    shutil.copytree(whole, folder)
    (folder / "index.json").unlink()
    victim = chooser.choice(shards(folder))
    data = bytearray(victim.read_bytes())
    kind = chooser.choice(["bit", "truncated", "torn", "mixed"])
    place = chooser.randrange(len(data))
    if kind == "bit":
        data[place] ^= 1 << chooser.randrange(8)
    elif kind == "truncated":
        del data[place:]
    elif kind == "torn":
        data[place:] = bytes(len(data) - place)
    else:
        data[place : place + 4096] = random.Random(place).randbytes(len(data[place : place + 4096]))
    victim.write_bytes(data)
    found = damages(folder)
    if not found:
        assert exact(folder) == list(range(TOTAL)), (kind, place)
        return f"{kind}: unused bytes, all rows exact"
    assert set(found) == {victim.name}, found
    left = exact(folder, without=found)
    assert 0 < len(left) < TOTAL
    return f"{kind}: named, the rest exact"


def full_disk(where: Path) -> str:
    """The disk fills up while training goes on, then room is made."""
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", where], capture_output=True
    ).returncode
    ballast = where / "ballast"
    try:
        if mounted:
            ballast.write_bytes(bytes(2**20))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        sink, errors = (
            store(where / "s", keep_factored=True, run="r", shard_examples=100 if not mounted else 20),
            0,
        )
        for n in range(2000):
            try:
                sink(block(n))
                if errors:
                    sink.flush()
            except OSError as error:
                errors += "still waiting" in str(error)
            if errors == 3:
                break
        assert errors == 3
        finished = exact(where / "s") if shards(where / "s") else []
        assert finished == list(range(len(finished)))
        ballast.unlink(missing_ok=True)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sink.close()
        found = exact(where / "s")
        assert found == list(range(len(found))) and len(found) > len(finished)
        return f"{'tmpfs of 2 MiB' if mounted else 'RLIMIT_FSIZE'}: named, {len(found)} rows exact with room made"
    finally:
        if mounted:
            subprocess.run(["umount", where], check=True)


def readonly(where: Path) -> str:
    """A store on a file system that became read-only."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", where], capture_output=True
    ).returncode:
        return "not tried: tmpfs cannot be mounted here"
    try:
        write(where / "s", range(TOTAL))
        subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        assert exact(where / "s") == list(range(TOTAL)) and not damages(where / "s")
        with suppress(OSError):
            store(where / "s")
            raise AssertionError("a read-only store was opened for writing")
        return "reads without an index, refuses to be written"
    finally:
        subprocess.run(["umount", where], check=True)


def two_writers(folder: Path) -> str:
    """Two processes write one store at once; then one run."""
    pairs = [(forked(lambda say, k=k: write(folder, range(k, TOTAL, 2), run=f"r{k}"))) for k in range(2)]
    assert all(os.waitpid(child, 0)[1] == 0 for child, _ in pairs)
    assert sorted(exact(folder)) == list(range(TOTAL)) and not damages(folder)
    with store(folder, run="same"):
        child, reader = forked(lambda say: refused(folder, say))
        os.waitpid(child, 0)
        assert said(reader) == [1]
    return "both runs complete, the same run refused"


def refused(folder: Path, say: Callable[[int], object]) -> None:
    """Says 1 if a second writer of a run is refused."""
    try:
        store(folder, run="same")
    except ValueError:
        say(1)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, outside: Path) -> str:
    """Files that want to be followed or executed."""
    write(folder, range(TOTAL))
    assert exact(folder) == list(range(TOTAL))
    index, trap = folder / "index.json", outside / "exploded"
    secret = outside / "secret.shard.h5"
    shutil.copy(shards(folder)[0], secret)
    entries = json.loads(index.read_text())["shards"]
    entries.append({**entries[0], "name": "../outside/secret.shard.h5", "size": secret.stat().st_size})
    index.write_text(enclosed(json.dumps(entries)))
    assert exact(folder) == list(range(TOTAL))
    index.write_bytes(pickle.dumps(Bomb(trap)))
    assert exact(folder) == list(range(TOTAL))
    (folder / "bomb.shard.h5").write_bytes(pickle.dumps(Bomb(trap)))
    (folder / "link.shard.h5").symlink_to(secret)
    found = damages(folder)
    assert set(found) == {"bomb.shard.h5", "link.shard.h5"} and exact(folder, without=found) == list(
        range(TOTAL)
    )
    assert not trap.exists()
    return "nothing followed, nothing executed, both files named"


def main() -> None:
    """Run all trials and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--kills", type=int, default=200, help="processes to kill before they are done")
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chooser, began = random.Random(asked.seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        start = time.perf_counter()
        child, _ = forked(lambda say: write(top / "first", range(TOTAL), say, run="r", shard_examples=3))
        os.waitpid(child, 0)
        longest = 1.1 * (time.perf_counter() - start)
        kills: Counter[str] = Counter()
        while sum(n for what, n in kills.items() if what.endswith(" killed")) < asked.kills:
            kills[killed(top / "kill", chooser, longest)] += 1
            shutil.rmtree(top / "kill")
        write(top / "whole", range(TOTAL), shard_examples=4)
        assert exact(top / "whole") == list(range(TOTAL))
        outcomes: Counter[str] = Counter()
        for trial in range(asked.damages):
            outcomes[damaged(top / "whole", top / f"damage{trial}", chooser)] += 1
            shutil.rmtree(top / f"damage{trial}")
        for name in ("disk", "ro", "outside"):
            (top / name).mkdir()
        result = {
            "command": "python " + " ".join(sys.argv),
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "folder": tempfile.gettempdir(),
                "versions": {name: version(name) for name in ("torch", "h5py", "numpy")},
            },
            "kill": {
                "trials": kills.total(),
                "within_seconds": round(longest, 3),
                **dict(sorted(kills.items())),
            },
            "damage": {"trials": asked.damages, **dict(sorted(outcomes.items()))},
            "disk": full_disk(top / "disk"),
            "readonly": readonly(top / "ro"),
            "writers": two_writers(top / "two"),
            "hostile": hostile(top / "inside", top / "outside"),
            "violations": 0,
            "seconds": round(time.perf_counter() - began, 1),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
