"""Serve a model of transformers to several clients: threads send prompts at any time, one thread computes rounds.

A `Batcher` has one pool of pages for all requests. Running requests get one token each in every round, whichever others
arrive or finish, and prompts that begin alike share pages. The model is the repository's, over bytes of the standard
library's sources. Each text must equal that of `generate` for the prompt alone; the script checks this.

python examples/serve_requests.py
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import torch
from transformers import AutoModelForCausalLM

from qflash.integrations.transformers import Batcher, Request, generate

SMALL = Path(__file__).resolve().parent / "llama" / "stdlib-small"
HEADER = '"""A class of the standard library."""\n\nimport threading\n\n\n'  # the beginning of all prompts
PROMPTS = (
    HEADER + "class Queue:\n    def ",
    HEADER + "def main(",
    HEADER + "class Lock:\n    def __enter__(self):\n        ",
    "import os, ",
    "for ",
)
NEW, PAGE = 24, 16


def client(batcher: Batcher, prompts: tuple[str, ...]) -> list[tuple[Request, str]]:
    """Send one prompt after the answer to another, from a thread. Returns requests and the text streamed for each."""
    answers = []
    for prompt in prompts:
        text = bytearray()
        request = batcher.submit(list(prompt.encode()), max_new_tokens=NEW, stream=text.append)
        while not request.is_done:
            sleep(0.001)
        if request.error is not None:
            raise request.error
        answers.append((request, text.decode(errors="replace")))
    return answers


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(SMALL, attn_implementation="eager").eval()
    batcher = Batcher(model, pages=64, page_size=PAGE, slots=4, prefill_tokens=32)
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, batcher, PROMPTS[at:] + PROMPTS[:at]) for at in range(3)]
        rounds = 0
        while not all(one.done() for one in clients):
            if batcher.step():
                rounds += 1
            else:
                sleep(0.001)  # there is no request
    answers = [answer for one in clients for answer in one.result()]
    alone = {}
    for ids in {request.ids for request, _ in answers}:
        alone[ids] = generate(model, torch.tensor([ids]), max_new_tokens=NEW, page_size=PAGE).new_tokens[0].tolist()
    assert all(request.tokens == alone[request.ids] for request, _ in answers)
    for request, text in answers[: len(PROMPTS)]:
        print(f"{bytes(request.ids).decode().removeprefix(HEADER)!r} → {text!r}")
    tokens = sum(len(request.tokens) for request, _ in answers)
    print(f"{len(answers)} requests of 3 clients, {tokens} tokens in {rounds} rounds")
    batcher.forget_prefixes()
    assert batcher.kv.free_pages == batcher.kv.pages


if __name__ == "__main__":
    main()
