import tempfile, torch
from torch import nn
def look(rank, group):
    import megatrain_torch as mt
    torch.manual_seed(0)
    m=nn.Sequential(nn.Linear(200,200),nn.Linear(200,200))
    want=[p.detach().clone() for p in m.parameters()]
    x=torch.ones(2,200); y=m(x).detach()
    m=mt.stream(m,"cpu",group=group,plan={"homes":"disk+weights"},nvme=tempfile.gettempdir())
    rt=m[0].weight._mt.runtime
    out=m(x).detach()
    eq=[]
    for p,w in zip(m.parameters(),want):
        v=p.detach().clone(); eq.append((torch.equal(v,w),(v!=w).flatten().nonzero().flatten()[:1].tolist(), (v!=w).sum().item()))
    res=(torch.equal(out,y), (out-y).abs().max().item(), eq, rt.core.portions(0), rt.core.bounds(0), [rt.core.offset(0,i) for i in range(2)])
    sl=rt.ring.slots[0].memory
    res+=( [ (int((sl[a:b]!=0).sum())) for a,b in zip(rt.core.bounds(0),rt.core.bounds(0)[1:])],)
    return res
