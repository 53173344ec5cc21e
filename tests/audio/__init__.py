"""Tests of `jspec.audio`."""
