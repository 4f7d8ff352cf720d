"""A vLLM in this process that follows versions; test_vllm.py runs it in vLLM's environment.

    vllm_worker.py CHECKPOINT SOURCE PROMPTS

Prints, as the last line, JSON of the tokens before and after versions 1 and 2, the error of version
7, which is not published, and the tokens after it.
"""

import json
import sys


def main(checkpoint, source, prompts):
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    llm = LLM(
        checkpoint, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=128, enable_prefix_caching=False,
        weight_transfer_config=WeightTransferConfig(backend="hipress"),
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def tokens():
        out = llm.generate([{"prompt_token_ids": p} for p in json.loads(prompts)], params)
        return [list(each.outputs[0].token_ids) for each in out]

    def update(**info):
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=(info,))
        llm.collective_rpc("finish_weight_update")
        return tokens()

    info = {"checkpoint": checkpoint, "source": source}
    llm.collective_rpc("init_weight_transfer_engine", args=(info,))
    found = [tokens(), update(version=1, prefetch=True), update(version=1), update(version=2)]
    try:
        update(version=7)
    except Exception as error:
        text = str(error)
    print(json.dumps({"tokens": found, "error": text, "after": tokens()}))


if __name__ == "__main__":  # vLLM starts processes that import this
    main(*sys.argv[1:])
