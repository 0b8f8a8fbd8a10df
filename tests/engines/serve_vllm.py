"""One vLLM server's life on a CPU, as a process of its own: serve prompts, say what came out.

``python -m tests.engines.serve_vllm URL MODEL OUT REQUEST...``: requests and answers are JSON. A
request's ``decoded`` token, if there is one, comes behind its prompt by decoding; the logits are
those behind the last token.
"""

import json
import os
import sys

# One process, so that it ends with us; and little memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

VOCABULARY = 256


def main(url: str, model: str, out: str, *requests: str) -> None:
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        attention_backend="CPU_MLA",  # whatever the processor has: AMX has no fp32
        max_logprobs=VOCABULARY,
        logprobs_mode="raw_logits",
        kv_transfer_config={
            "kv_connector": "LatentKVConnector",
            "kv_connector_module_path": "mla.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url, "match_timeout": 20.0},
        },
    )
    answers = []
    for request in map(json.loads, requests):
        sampling = SamplingParams(
            max_tokens=1 if request["decoded"] is None else 2,
            allowed_token_ids=None if request["decoded"] is None else [request["decoded"]],
            temperature=0,
            logprobs=VOCABULARY,
            detokenize=False,
        )
        (output,) = engine.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)
        last = output.outputs[0].logprobs[-1]
        logits = [last[token].logprob for token in range(VOCABULARY)]
        counters = get_kv_transfer_group()._worker.counters()
        loaded, short = counters["loaded_blocks"], counters["short_loads"]
        answers.append({"loaded": loaded, "short": short, "logits": logits})
    with open(out, "w") as file:
        json.dump(answers, file)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
