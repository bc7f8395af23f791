"""What the figures of the benchmarks mean, for people who read them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "of the model or the delta",
        "threads": "that were used",
        "repeats": "turns that were measured",
        "turns": "that were measured",
        "model": "whose sizes were used",
        "batch": "sequences in a step",
        "context_tokens": "tokens of a sequence",
        # step
        "plain_step_s": "a step of a plain PyTorch loop",
        "inner_step_s": "a step of the worker's loop",
        "layer_major_step_s": "a step, one layer after the other, all layers resident",
        "inner_speed_vs_plain": "above 1 the worker is faster than the plain loop",
        "layer_major_time_vs_inner": "1.03 is 3 % longer than the worker's loop",
        "loss_gap": "largest distance of the three losses, in nats: they train the same model",
        # attention
        "layers": "how many layers have which window, in tokens",
        "layer_ms": "milliseconds of a layer, by its window",
        "plan_s": "attention of all layers with their windows",
        "full_s": "the same with full attention in every layer",
        "plan_vs_full": "the time's ratio: below 1 the windows save time",
        "pairs_vs_full": "the ratio of the pairs of tokens that are looked at",
        # codec
        "kept_per_chunk": "values kept of 4096",
        "deltas": "where they come from: trained on the shipped text, or drawn at random",
        "blob_bytes": "what is sent",
        "bits_per_parameter": "of what is sent",
        "bits_vs_bound": "beside the entropy of as many random positions and 2 bits a value, for all that may be kept",
        "bits_vs_bound_of_sent": "the same for the values that were kept",
        "encode_params_per_s": "compressing, on one thread",
        "encode_two_threads_params_per_s": "compressing, on two threads",
        "two_threads_vs_one": "speed on two threads over that on one",
        "two_cores_vs_one": "what a second thread brought to plain work in the same turns: no encoder can do better",
        "decode_params_per_s": "opening and adding up, on one thread",
        "torch_topk_params_per_s": "only choosing the largest values with torch.topk",
        "encode_vs_topk": "speed of compressing over that of torch.topk",
        "encode_bytes_per_s": "compressing, in bytes of float32",
        "memory_read_bytes_per_s": "reading the same bytes once",
        "memory_read_two_threads_vs_one": "what a second thread brought to reading",
        "encode_vs_memory_read": "speed of compressing over that of reading",
        # fold
        "contributions": "of a round",
        "decode_s": "opening all contributions",
        "screen_s": "comparing them with each other",
        "fold_s": "adding them to the model",
        "seconds": "all three",
        "state_bytes": "the model in float32",
        "tensor_bytes": "its largest tensor",
        "peak_bytes": "memory at the highest point",
        "peak_over_state_and_blobs_bytes": "the same without the new model and the contributions",
        # overhead
        "node_tokens_per_s": "training in a node",
        "bare_tokens_per_s": "the same training without a node",
        "ratio": "node over bare, the median: 1 is no overhead",
        "ratios": "of the blocks, in order",
        "blocks": "in which node and bare loop took turns",
        "block_s": "the length of a block",
        "round_s": "the length of the node's rounds",
    }
)
