"""A few trials of the crash campaign; `benchmarks/crash.py` runs hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "crash.py"


def test_kills_damages_full_disks_and_hostile_files(tmp_path):
    found = subprocess.run(
        [
            sys.executable,
            CAMPAIGN,
            tmp_path / "result.json",
            "--kills",
            "12",
            "--damages",
            "24",
            "--seed",
            "3",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    killed = sum(n for name, n in result["kill"].items() if name.endswith(" killed"))
    named = sum(n for name, n in result["damage"].items() if "named" in name)
    assert killed == 12 and named > 12 and result["violations"] == 0
