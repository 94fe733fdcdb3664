"""Build the documentation's site into build/site. A warning, for example about a dead link or heading, is an error.

mkdocs.yml configures it. If MkDocs is not installed (`make docs VENV=`), this is reported and the site is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"mkdocs-material": "material", "mkdocs-awesome-nav": "mkdocs_awesome_nav"}  # requirement -> module


def main() -> int:
    missing = [name for name, module in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"docs: {', '.join(missing)} is not installed, the site is not built")
        return 0
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # not --quiet: with it, --strict counts no warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=quiet).returncode


if __name__ == "__main__":
    sys.exit(main())
