"""Trackers as sinks: every metric, configuration, event and command of replicas, in the tracker of your choice.

`loom.exporters.exporter` follows the weaver and writes each point once; a module for each tracker does what its
package offers. None of these packages is imported before it is used.
"""
