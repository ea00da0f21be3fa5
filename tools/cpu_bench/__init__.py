"""The parts of `tools/bench_cpu.py`: rounds, forms, sections, results."""
