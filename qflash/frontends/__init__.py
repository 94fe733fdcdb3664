"""One module or package per framework. Each offers run, run_in_place, plan_of, arch_of, as_index and scalar, for every
operation."""
