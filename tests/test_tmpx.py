import sys, json, torch
def test_a(launcher, tmp_path):
    line="    logps_mC, entropy_mC = policy(*micro.tokens)  # fp32, through the wrapper\n"
    ed={line: line+"    print('DUMP', distributed.rank(), micro.rows.tolist(), logps_mC.detach().double().sum().item(), micro.old_logps.double().sum().item(), sum(p.detach().double().sum().item() for p in policy.parameters()), {p.data_ptr()%64 for p in policy.parameters()}, flush=True)\n"}
    s1=launcher.copy("gspo",edits=ed); s2=launcher.copy("gspo_ddp",edits=ed)
    for i in range(2):
        for s,r in ((s1,1),(s2,2)):
            a=launcher.run(s, tmp_path/f"{i}{r}", r, steps=1)
            for l in sorted(l[l.index("DUMP"):] for l in a.output.splitlines() if "DUMP" in l)[:2]: print(i,r,l)
