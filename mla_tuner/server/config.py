"""What Datasette is told of the shared file: titles, descriptions, and queries that are ready."""

from __future__ import annotations

from typing import Any

NAME = "shared"  # of the database, in addresses

_ABOUT = "What the machines of a team measured. Rows are only ever added."
_PLACE = "context, batch, heads, dtype, q_len, layout"

METADATA: dict[str, Any] = {
    "title": "mla-tuner: tuning tables of a team",
    "description": _ABOUT,
    "databases": {
        NAME: {
            "description": _ABOUT,
            "tables": {
                "evidence": {
                    "description": "The final duel of one run in one bucket.",
                    "sort_desc": "id",
                    "columns": {
                        "hash": "SHA-256 of what the row says",
                        "run": "The run that measured it",
                        "context": "Tokens of the longest sequence, rounded",
                        "speedup": "Median of time(baseline) / time(plan), paired within rounds",
                        "speedup_low": "Lower end of its 95 % interval",
                        "speedup_high": "Upper end of its 95 % interval",
                        "rounds": "Pairs that the interval is made of",
                        "failed": "wrong or error; empty: it ran, and was right",
                        "body": "The entry as shared tables have it",
                    },
                },
                "run": {
                    "description": "A run of the tuner: on which device, with what.",
                    "columns": {
                        "id": "Digest of what the row says",
                        "kernel": "Digest of the kernels' texts",
                        "system": "OS and driver",
                        "clock": "gpu: GPU time with the queue full; wall: the host's clock",
                    },
                },
                "devices": {"description": "Devices, once for each kernel, MLX and system."},
            },
        }
    },
}

QUERIES: dict[str, Any] = {
    "fastest": {
        "title": "The largest speed-ups of a device",
        "description": "Measured by single runs; the page of the device has them pooled.",
        "sql": f"SELECT {_PLACE}, path, partitions, tile, speedup, speedup_low, speedup_high, run "
        "FROM evidence WHERE run IN (SELECT id FROM run WHERE device = :device) "
        "AND speedup IS NOT NULL ORDER BY speedup_low DESC LIMIT 100",
    },
    "disagreements": {
        "title": "Runs that disagree on a plan",
        "description": "The same plan, bucket, device and versions; intervals that don't meet.",
        "sql": "WITH told AS (SELECT * FROM evidence JOIN "
        "(SELECT id AS of, device, kernel, mlx, system FROM run) ON of = run) "
        "SELECT a.device, a.context, a.batch, a.heads, a.dtype, a.path, a.partitions, a.tile, "
        "a.speedup, b.speedup AS other_speedup, a.run, b.run AS other_run "
        "FROM told a JOIN told b ON (a.device, a.kernel, a.mlx, a.system, a.context, a.batch, "
        "a.heads, a.dtype, a.kv_lora_rank, a.rope_dim, a.q_len, a.layout, a.path, a.partitions, "
        "a.tile) = (b.device, b.kernel, b.mlx, b.system, b.context, b.batch, b.heads, b.dtype, "
        "b.kv_lora_rank, b.rope_dim, b.q_len, b.layout, b.path, b.partitions, b.tile) "
        "WHERE a.speedup_high < b.speedup_low ORDER BY b.speedup_low / a.speedup_high DESC",
    },
    "failures": {
        "title": "Plans that were wrong or failed",
        "sql": f"SELECT device, {_PLACE}, path, partitions, tile, failed, evidence.day, run "
        "FROM evidence JOIN run ON run.id = run WHERE failed != '' ORDER BY evidence.id DESC",
    },
    "contributors": {
        "title": "Who added what",
        "sql": "SELECT contributor, count(*) AS evidence, count(DISTINCT run) AS runs, "
        "max(received) AS last FROM evidence GROUP BY contributor ORDER BY evidence DESC",
    },
}
