"""Packaging. `make quickstart` and `make test` install pinned requirements; the ranges here are for other environments.

NVIDIA's apex is optional and deliberately absent: the package of that name on PyPI is a web toolkit of 2013, not NVIDIA's.
It is built from source or comes with NVIDIA's PyTorch image; `python -m megatron_dapo doctor` tells which one is there.
"""

from setuptools import find_packages, setup

setup(
    name="megatron-dapo",
    version="0.1.0",
    description="DAPO for large language models on Megatron-LM",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_dapo", "megatron_dapo.*"]),
    install_requires=[
        "torch>=2.13",
        "megatron-core==0.19.2",
        # megatron.training imports these without declaring them (without psutil, saving a checkpoint hangs)
        "absl-py",
        "einops",
        "psutil",
        "tensorboard",
        "transformers>=5.19",
        "aiohttp>=3.14",
        "requests",
        "wandb",
        "nltk",
        "numpy",
        "pyarrow",
        "math-verify[antlr4-13-2]==0.9.0",
        "reasoning-gym==0.1.25",
        "tqdm",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        "te": ["transformer_engine[pytorch,core_cu13]"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "ruff"],
        "plot": ["matplotlib"],
    },
    entry_points={
        "console_scripts": ["megatron-dapo = megatron_dapo.__main__:main"],
        "sglang.srt.platforms": ["megatron_dapo_cpu = megatron_dapo.platform.sglang_cpu:activate"],
    },
)
