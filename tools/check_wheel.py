"""Installs a wheel into a fresh environment and runs it there: `check_wheel.py dist/regard-….whl`.

The environment borrows torch from the Python that runs this. Exits with 1, and what was wrong, unless the package comes
from the wheel, its kernels load, and attention and its gradients are those of the definition.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import pathlib, sys
import torch, regard
from regard.backends.native import library

assert pathlib.Path(regard.__file__).is_relative_to(sys.prefix), f"regard comes from {regard.__file__}"
assert library.REASON is None, library.REASON
results = []
for backend in ("native", "reference"):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 33, 16, generator=generator, requires_grad=True) for h in (4, 2, 2))
    out = regard.attention(q, k, v, mask=regard.masks.Window(8), backend=backend)
    results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
torch.testing.assert_close(*results)
print(f"regard {regard.__version__} runs from its wheel: kernels {library.ISA}, torch {torch.__version__}")
"""


def main(wheel: Path) -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "REGARD_"))}
    with tempfile.TemporaryDirectory() as place:
        python = Path(place) / "fresh" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", wheel]
        subprocess.run(install, check=True, cwd=place, env=environment)
        (packages,) = python.parents[1].glob("lib/python*/site-packages")
        # a path in a .pth file comes last, and the .pth files in it (an editable install's) are not read
        (packages / "torch-of-the-builder.pth").write_text("\n".join(site.getsitepackages()))
        return subprocess.run([python, "-c", PROGRAM], cwd=place, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
