"""Packaging of verl-drmas. Dependencies live here; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# verl 0.9.1 changed the agent loop's constructor and its token helpers (ct_merge_context_msg), so 0.9.0 can't run our
# rollout; 0.10 may move the V1 trainer's stages that the team trainer fans out. `verl-drmas doctor` checks each name.
VERL_RANGE = ">=0.9.1,<0.10"

# math-verify parses with antlr and has one parser for each antlr version; Hydra pins 4.9.3, so this is the one to take.
MATH = ["math-verify[antlr4-9-3]>=0.9.0"]
# jinja2 and tensorboard come with verl; the report needs them where it doesn't.
REPORT = ["jinja2>=3.1", "matplotlib>=3.8", "tensorboard>=2.14"]
# What rollout workers need to search: an embedded index of words, or a server's client.
SEARCH = ["aiohttp>=3.10", "bm25s>=0.3", "orjson>=3.9", "PyStemmer>=2.2", "tenacity>=8.3", "yarl>=1.9"]
# What builds and serves an index. faiss with GPU support has other distributions; any of them serves instead.
RETRIEVER = [
    *SEARCH,
    "faiss-cpu>=1.11",
    "fastapi>=0.115",
    "prometheus-client>=0.20",
    "sentence-transformers>=6",
    "starlette>=0.40",
    "uvicorn[standard]>=0.30",
]
# What two decoupled jobs meet in, a database on SQLite or PostgreSQL and a gateway; and what starts both.
STORE = [
    "fastapi>=0.115",
    "httpx>=0.27",
    "orjson>=3.9",
    "psutil>=5.9",
    "psycopg[binary]>=3.1",
    "sqlalchemy>=2",
    "starlette>=0.40",
    "tenacity>=8.3",
    "uvicorn[standard]>=0.30",
]

# vLLM's CPU wheel is installed without its dependencies (see the Makefile), because it asks for torchvision, torchaudio
# and torchcodec, whose builds don't import beside a CPU torch; these are the ones that a text model needs.
REQUIREMENTS = (HERE / "verl_drmas/cpu/requirements.txt").read_text()
CPU = [line for line in REQUIREMENTS.splitlines() if line and not line.startswith("#")]

setup(
    name="verl-drmas",
    version="0.1.0",
    description="Train teams of language-model agents with stock verl: Dr. MAS and M-GRPO as a plugin",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # Hydra looks for plugins in the namespace package `hydra_plugins`, and for configs in a package; in the repository
    # both lie where a reader expects them.
    packages=[*find_packages(include=["verl_drmas", "verl_drmas.*"]), "verl_drmas.configs", "hydra_plugins"],
    package_dir={"verl_drmas.configs": "configs", "hydra_plugins": "verl_drmas/hydra_plugins"},
    package_data={
        "verl_drmas.configs": ["*.yaml", "*/*.yaml"],
        "verl_drmas.cpu": ["requirements.txt"],
        "verl_drmas.report": ["page.html", "paper_tables.json"],
        "verl_drmas.trace": ["page.html", "page.css", "page.js"],
    },
    install_requires=[
        f"verl{VERL_RANGE}",
        "TransferQueue>=0.1.10",
        "datasets>=3.0",
        "numpy>=2.0",
        "packaging>=20.0",
        "pandas>=2.0",
        "pyarrow>=19.0",
        "pydantic>=2.0",
        "pyzmq>=25.0",
        "rich>=13",
        "typer>=0.12",
        "wrapt>=1.16",
    ],
    extras_require={
        "math": MATH,
        "report": REPORT,
        "search": SEARCH,
        "retriever": RETRIEVER,
        "store": STORE,
        "cpu": [*CPU, *MATH, *REPORT, *RETRIEVER, *STORE],
        # verl's own extras carry the pins of each engine; `fsdp` brings flash-attn.
        "gpu": [f"verl[vllm,fsdp]{VERL_RANGE}", *MATH, *REPORT, *SEARCH, *STORE],
        "megatron": [f"verl[vllm,megatron]{VERL_RANGE}", *MATH, *REPORT, *SEARCH, *STORE],
        "sglang": [f"verl[sglang,fsdp]{VERL_RANGE}", *MATH, *REPORT, *SEARCH, *STORE],
        "dev": [
            "filelock>=3.12",
            "httpx>=0.27",
            "hypothesis>=6.100",
            "pre-commit>=3.7",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.6",
        ],
    },
    entry_points={
        "verl.plugins": ["drmas = verl_drmas.plugin"],
        "console_scripts": ["verl-drmas = verl_drmas.cli:main"],
    },
)
