"""Prints the packages of the extra `real` that this Python can use."""

from importlib.metadata import requires

from packaging.requirements import Requirement

for each in map(Requirement, requires("quant-gru") or ()):
    if each.marker and each.marker.evaluate({"extra": "real"}):
        if not each.marker.evaluate({"extra": ""}):
            print(each.name)
