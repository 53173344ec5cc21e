"""Measuring: theory, audits, benchmarks, experiments and their reports."""
