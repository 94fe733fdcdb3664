"""Loads a checkpoint of transformers' Llama as weights for this folder's models, with only NumPy."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from llama.shape import Shape

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Name here -> name in transformers, whose matrices are [out, in].
OF_A_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file: the length of a JSON header, the header, and the data at the offsets it specifies."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in TYPES:
            raise ValueError(f"{name} has dtype {about['dtype']}; allowed: {', '.join(TYPES)}")
        first, last = about["data_offsets"]
        array = np.frombuffer(data[start + first : start + last], TYPES[about["dtype"]])
        found[name] = array.reshape(about["shape"])
    return found


def load(folder: Path) -> tuple[Shape, dict[str, np.ndarray]]:
    """The model's shape and its float32 weights, named as in `first_weights`."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden=config["intermediate_size"],
        length=config["max_position_embeddings"],
        eps=config["rms_norm_eps"],
    )
    kept = safetensors(folder / "model.safetensors")

    def taken(name: str) -> np.ndarray:
        return np.ascontiguousarray(kept[f"{name}.weight"].astype(np.float32).T)

    weights = {"embedding": taken("model.embed_tokens").T, "norm": taken("model.norm"), "head": taken("lm_head")}
    for layer in range(shape.layers):
        weights |= {f"{layer}.{ours}": taken(f"model.layers.{layer}.{theirs}") for ours, theirs in OF_A_LAYER.items()}
    return shape, weights
