"""How much work a run is: tokens, candidates, updates and prompts."""

from __future__ import annotations

from adaflash.plan.job import Job


def counts_of(job: Job) -> dict[str, float]:
    """Numbers over all devices; at most, since responses may end early.

    A trajectory serves `reuse` visits. A block supervises K = block_size - 1 candidates, its last ones not beyond the
    response.
    """
    trajectories = job.batch_size * job.accumulate * job.layout.ranks
    size = job.drafter.block_size
    candidates = trajectories * job.anchors * (size - 1)
    prompts = job.max_steps * trajectories / job.reuse
    return {
        "trajectories_per_update": trajectories,
        "response_tokens_per_update": trajectories * job.response,
        "drafter_tokens_per_update": trajectories * job.anchors * size,
        "candidates_per_update": candidates,
        "updates": job.max_steps,
        "candidates": candidates * job.max_steps,
        "prompts": prompts,
        "response_tokens": prompts * job.response,
    }
