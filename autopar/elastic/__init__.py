"""Jobs that plan anew while they run: where a device has become slow, and that pays."""

from autopar.elastic.job import Elastic

__all__ = ["Elastic"]
