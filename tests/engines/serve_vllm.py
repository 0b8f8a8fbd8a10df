"""One vLLM server's life on a CPU, as a process of its own: serve prompts, say what came out.

``python -m tests.engines.serve_vllm URL MODEL OUT PROMPT...``: prompts and answers are JSON.
"""

import json
import os
import sys

# One process, so that it ends with us; and little memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

VOCABULARY = 256
ANSWER = 3  # tokens


def main(url: str, model: str, out: str, *prompts: str) -> None:
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        attention_backend="CPU_MLA",  # whatever the processor has: AMX has no fp32
        # vLLM's CPU kernel for rope takes the stride of a head for that of a token, and so turns other
        # numbers than a MLA model's query and key: its answers would depend on where a prefill begins.
        compilation_config={"custom_ops": ["-rotary_embedding"]},
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
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=VOCABULARY, detokenize=False)
    answers = []
    for prompt in map(json.loads, prompts):
        before = get_kv_transfer_group()._worker.counters()
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        counters = get_kv_transfer_group()._worker.counters() - before
        answer = output.outputs[0]
        logits = [[step[token].logprob for token in range(VOCABULARY)] for step in answer.logprobs]
        loaded, short = counters["loaded_blocks"], counters["short_loads"]
        answers.append({"loaded": loaded, "short": short, "tokens": list(answer.token_ids), "logits": logits})
    with open(out, "w") as file:
        json.dump(answers, file)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
