"""The Python blocks of docs/embedding.md are one program, and it runs."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(240)


def test_the_program_of_the_page_runs(repository, tmp_path):
    text = (repository / "docs" / "embedding.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "c [1, 1" in done.stdout or "c [1]" in done.stdout
    assert "b [0]" in done.stdout
