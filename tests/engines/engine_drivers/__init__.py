"""One small class per engine, all with the same methods, so that one table of scenarios runs over every engine."""
