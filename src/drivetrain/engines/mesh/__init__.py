"""Pipeline, data, context and tensor parallelism on one device mesh."""
