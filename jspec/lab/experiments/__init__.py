"""Experiments from config files: what to measure, measuring it, keeping what was measured."""
