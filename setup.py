"""What pyproject.toml cannot say: the compiled core, and where the examples and benchmarks go.

The core is optional: without a C++ compiler the install succeeds, and ranks use gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
CORE = Path("src/core")

# A checkout's core can be told to fail at a step, which the tests do; a wheel's cannot.
faults: list[tuple[str, str | None]] = (
    [("UNISONO_FAULTS", None)] if {"editable_wheel", "--inplace"} & set(sys.argv) else []
)
extensions = []
if sys.platform == "linux":
    extensions.append(
        Extension(
            "unisono._core",
            sorted(str(path.relative_to(HERE)) for path in (HERE / CORE).glob("*.cpp")),
            depends=sorted(str(path.relative_to(HERE)) for path in (HERE / CORE).glob("*.hpp")),
            language="c++",
            # Sums must have the same bits on every machine, so nothing is fused.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-g0",
                "-Wno-psabi",
            ],
            define_macros=[("Py_LIMITED_API", "0x030B0000"), *faults],
            py_limited_api=True,
            optional=True,
        )
    )

packages = find_packages("src", include=["unisono", "unisono.*"])
directories = {"": "src"}
if "editable_wheel" not in sys.argv:  # a checkout has them at their own place
    for name in ("benchmarks", "examples"):
        packages.append(f"unisono._{name}")
        directories[f"unisono._{name}"] = name

setup(
    packages=packages,
    package_dir=directories,
    package_data={
        "unisono": ["py.typed"],
        "unisono.train.recording": ["assets/*"],
        "unisono._benchmarks": ["**/*"],
        "unisono._examples": ["**/*"],
    },
    ext_modules=extensions,
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if extensions else {},
)
