"""One module per framework and kind of call: attention offers attention, attention_varlen, problem_of and arch_of;
the operations beside it offer run_op and scalar."""
