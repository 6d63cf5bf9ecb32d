"""Natural mistakes in chapter 23's exercises."""

MISTAKES = {
    "who_am_i": {
        "no launcher: return (rank, local rank, world size, address), not 0": lambda environ: 0,
        "torchrun: variables are text, and ranks are whole numbers": {"int(environ[name])": "environ[name]"},
        "torchrun started by srun: (6, 2, 12), but srun": {'if "RANK"': 'if "SLURM_PROCID" not in environ and "RANK"'},
        "torchrun: rank, local rank and world size are (5, 1, 8), not (5, 5, 8)": {
            "rank, local, size,": "rank, rank, size,"
        },
        "no launcher: the address is 127.0.0.1, not 'localhost'": {"127.0.0.1": "localhost"},
        "the first machine of gpu-a[1-2] is gpu-a1, not 'gpu'": {
            'first[1] + (first[2] or "")': "environ['SLURM_JOB_NODELIST'].split(',')[0].split('-')[0].replace('[', '')"
        },
        "the first machine of otto[3] is otto3, not 'otto3]'": {
            'first[1] + (first[2] or "")': "re.split(r'-\\d|,', environ['SLURM_JOB_NODELIST'])[0].replace('[', '')"
        },
        "the first machine of gpu[07-09,12],login1 is gpu07, not 'gpu7'": {"first[2] or": "first[2].lstrip('0') or"},
    },
    "cable_bytes": {
        "dp 3 × tp 2, 2 ranks a machine: return a number of bytes, not None": lambda *args: None,
        "bytes are all that is sent; a hop inside": {
            "int((ranks // per_machine != following // per_machine).sum())": "ranks.numel()"
        },
        "a ring is closed, its last rank sends": {"per_machine != following": "per_machine < following"},
        "an all-reduce goes round twice": {"hops * 2 *": "hops *"},
        "count the hops of every group between two machines": {"return total": "return total / ranks.numel()"},
    },
}
