import sys, torch, os
from concurrent.futures import ProcessPoolExecutor
from quant_gru.kernels.cuda import compiler, back_planner
from quant_gru.kernels.cuda.back_structures import BackC
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel
R={1:132,2:66,4:30,8:15,16:7}
def jobs():
    for H in (64,128,256,512,640):
        for rows in (1,8,2,4):
            for s in back_planner.candidates(H,1,1,R):
                if s.rows!=rows: continue
                if rows in (2,4) and H not in (128,256): continue
                if s.threads<32: continue
                yield H,s
def comp(j):
    H,s=j
    compiler.machine_code('back',{**PLAIN,**s.macros(True,0,1)},'sm_90a')
def main():
    from quant_gru.kernels.cuda.driver import machine_of
    js=list(jobs()); print(len(js))
    with ProcessPoolExecutor(14) as p: list(p.map(comp,js,chunksize=4))
    m=machine_of(torch.device('cuda')); print(dict(m.clusters()))
    T=300; res={}
    for H,s in js:
        out=[]
        for tiles in (1, m.clusters()[s.blocks]):
            N=tiles*s.rows
            z=torch.zeros(T*N*H*2,dtype=torch.int32,device='cuda'); g=torch.zeros(T,N,H,device='cuda'); l=torch.zeros(N,H,device='cuda')
            fr=torch.zeros(s.fragments,dtype=torch.int32,device='cuda'); sc=torch.ones(3*H,device='cuda'); d=torch.empty_like(g); dh=torch.empty_like(l)
            p=(BackC*1)(); q=p[0]
            q.weights,q.slopes,q.scales,q.grad_out,q.grad_last,q.d,q.dh0=(x.data_ptr() for x in (fr,z,sc,g,l,d,dh))
            q.T,q.N,q.H,q.reverse=T,N,H,0; q.stride_t,q.stride_n,q.stride_h=g.stride()
            k=Kernel.of('back','back',{**PLAIN,**s.macros(True,0,1)}); grid=Grid((tiles*s.blocks,1),s.threads,s.blocks,s.shared_bytes)
            best=1e9
            for _ in range(4):
                a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(); m.launch(k,grid,p); b.record(); b.synchronize(); best=min(best,a.elapsed_time(b)*1e3/T)
            out.append(best)
        print(f"H={H} rows={s.rows} CL={s.blocks} MT={s.tiles} KS={s.split} thr={s.threads} regs={s.weight_registers} E={s.elements} one={out[0]:.3f} full={out[1]:.3f} model={back_planner.step_time(s)/1900:.3f}",flush=True)
if __name__=='__main__': main()
