"""Files for other runtimes, made from plans."""
