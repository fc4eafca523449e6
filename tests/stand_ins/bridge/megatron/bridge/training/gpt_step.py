def forward_step(state, data_iterator, model, return_schedule_plan=False):
    raise NotImplementedError("the stand-in trains nothing")
