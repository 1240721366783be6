"""Rollout sources: where the trajectories that teach come from."""
