def test_try(launcher, tmp_path):
    run = launcher.trained("sft")
    print(run.output)
    for l in run.lines: print(l)
    print(run.checkpoints)
    assert 0
