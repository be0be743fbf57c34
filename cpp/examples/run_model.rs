// Runs a frozen GRU on one step of ones: run_model FILE C H.
//     rustc -L DIR -l gru_quant_shared run_model.rs
use std::ffi::{c_void, CStr, CString};
use std::os::raw::{c_char, c_int};

extern "C" {
    fn qgru_load(path: *const c_char, model: *mut *mut c_void) -> c_int;
    fn qgru_run(model: *const c_void, x: *const f32, t: i64, n: i64, y: *mut f32, options: *const c_void) -> c_int;
    fn qgru_free_model(model: *mut c_void);
    fn qgru_last_error() -> *const c_char;
}

fn check(status: c_int) {
    assert!(status == 0, "{}", unsafe { CStr::from_ptr(qgru_last_error()) }.to_string_lossy());
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let numbers: Vec<usize> = arguments.iter().skip(2).filter_map(|each| each.parse().ok()).collect();
    if arguments.len() != 4 || numbers.len() != 2 {
        eprintln!("usage: {} FILE C H\n  FILE  a frozen GRU: gru.freeze().save(FILE) in Python\n  C, H  its input_size and hidden_size", arguments[0]);
        std::process::exit(2);
    }
    let path = CString::new(arguments[1].as_str()).unwrap();
    let (c, h) = (numbers[0], numbers[1]);
    let (x, mut y, mut model) = (vec![1f32; c], vec![0f32; h], std::ptr::null_mut());
    unsafe {
        check(qgru_load(path.as_ptr(), &mut model));
        check(qgru_run(model, x.as_ptr(), 1, 1, y.as_mut_ptr(), std::ptr::null()));
        qgru_free_model(model);
    }
    println!("{y:?}");
}
