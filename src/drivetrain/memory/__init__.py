"""Ways to need less memory: recompute, offload, the allocator, limits, and recovery when memory runs out."""
