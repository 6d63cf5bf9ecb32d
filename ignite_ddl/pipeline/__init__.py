"""Pipeline parallelism: a model's layers cut into stages, run by one of torch's schedules."""
