"""Simulation of caches on recorded traces: policies, sizes, tiers and window pools.

Start with ``report`` (makes all ``results`` of a trace), then ``run`` (one policy at one size). Index and policies
are those of a store. Imports ``trace``, ``index``, ``policy``, ``layout`` and ``output``; called by ``cli``.
"""
