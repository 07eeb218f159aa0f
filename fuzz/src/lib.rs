//! What several targets need.

/// The variable that asks `schedule` to make small what it finds.
pub const SHRINK: &str = "HOLDFAST_SHRINK";

/// A fuzzer's bytes as steps. 255 ends one: what is done to a step leaves those behind it as they were.
#[must_use]
pub fn steps(bytes: &[u8]) -> Vec<&[u8]> {
    bytes.split(|byte| *byte == 255).collect()
}

/// Plants a fault: switches the safeguard off that `HOLDFAST_OFF` names, if it names one.
///
/// # Panics
/// If there is none of that name, or no switch in this build.
pub fn plant() {
    let Ok(name) = std::env::var("HOLDFAST_OFF") else { return };
    #[cfg(feature = "mutants")]
    {
        use holdfast_core::rule::{Rule, switch_off};
        let rule = Rule::ALL.iter().copied().find(|rule| rule.key() == name);
        switch_off(Some(rule.unwrap_or_else(|| panic!("no rule is called {name}"))));
    }
    #[cfg(not(feature = "mutants"))]
    panic!("{name} cannot be switched off: this is built without the feature `mutants`");
}
